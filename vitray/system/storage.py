"""Files at a path or an `s3://bucket/key` address, with the same functions for both.

S3 is configured by its standard environment variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, ...), never
by the address, because addresses end up in plans and logs. No function creates a bucket.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from vitray.errors import ConfigError, RunError, cut_middle
from vitray.system.scratch import temporary_folder

_LOCAL = fs.LocalFileSystem()
# Wider than AWS's rule: other servers allow more.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")

# S3 calls are retried with exponential backoff, for up to half a minute, so a server restart ends no run.
# Timeouts are in seconds.
MAX_ATTEMPTS, CONNECT_TIMEOUT, REQUEST_TIMEOUT = 7, 5, 15

# The beginning of the name of a file that is being written; a killed process leaves it.
UNFINISHED = ".writing-"

# File systems allow 255 bytes; temporary files and folders of trials add to a name.
LONGEST_NAME = 200


class FileVersion(NamedTuple):
    """Size and time of change of a file, from a listing."""

    size: int
    """In bytes."""
    changed: int
    """Time of change in ns since 1970."""


def is_remote(url: str) -> bool:
    """Whether the address is on S3."""
    return url.startswith("s3://")


def join(url: str, *names: str) -> str:
    """Return the address of a file or folder inside `url`."""
    return "/".join([url.rstrip("/"), *names])


def absolute(url: str) -> str:
    """Return the address as an absolute one: Ray's workers run in other working folders."""
    if "://" in url:
        return url
    try:
        return str(Path(url).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(f"{url}: no home folder of that user") from None


def check_name(name: str | None, option: str) -> None:
    """Reject a name that cannot be a folder inside another folder; None is accepted."""
    if name is None:
        return
    is_folder = all(part.strip() and part not in (".", "..") for part in name.split("/"))
    if not is_folder or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise ConfigError(
            f"{option}: got {cut_middle(repr(name), 80)}, expected the name of a folder: one line of at most"
            f" {LONGEST_NAME} bytes, without . and .."
        )


def filesystem(url: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of an address, and the path on it."""
    bucket, _ = split_url(url)
    if bucket is not None:
        return _s3(bucket), url.removeprefix("s3://").rstrip("/")
    return _LOCAL, absolute(url)


def split_url(url: str) -> tuple[str | None, str]:
    """Return the bucket and key of an S3 address, or None and the path; reject other addresses."""
    if "\0" in url or url != url.encode(errors="replace").decode():
        raise ConfigError(f"{cut_middle(repr(url), 200)}: expected a path of UTF-8 text without null bytes")
    if not is_remote(url):
        if "://" in url:
            raise ConfigError(f"{url}: expected a path or s3://bucket/key")
        return None, url
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if "@" in bucket or "?" in url:  # not quoted: the message would put the secret into logs
        raise ConfigError(
            "s3://: an address with keys or options in it; expected s3://bucket/key, with keys in AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and another server in AWS_ENDPOINT_URL"
        )
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{cut_middle(url, 400)}: got the bucket {bucket[:80]!r}, expected s3://bucket/key")
    return bucket, key.rstrip("/")


@lru_cache
def _s3(bucket: str) -> fs.FileSystem:
    # Each process creates its own: a pickled pyarrow file system loses its retry strategy.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    with _as_config_error(f"s3://{bucket}"):
        return fs.S3FileSystem(
            endpoint_override=endpoint or None,
            region=None if endpoint else fs.resolve_s3_region(bucket),
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=MAX_ATTEMPTS),
            connect_timeout=CONNECT_TIMEOUT,
            request_timeout=REQUEST_TIMEOUT,
        )


def exists(url: str) -> bool:
    """Whether a file exists."""
    files, path = filesystem(url)
    with _as_config_error(url):
        return files.get_file_info(path).type == fs.FileType.File


def check_there(*urls: str) -> None:
    """Refuse a local address where nothing is; those of S3 and MLflow are looked up later."""
    for url in (url for url in urls if ":/" not in url):
        files, path = filesystem(url)
        with _as_config_error(shown := cut_middle(url, 400)):
            if files.get_file_info(path).type == fs.FileType.NotFound:
                raise ConfigError(f"{shown}: no such file or folder")


def list_files(url: str) -> list[str]:
    """Return the sorted relative names of all files below a folder; empty if there is no folder."""
    return list(file_sizes(url))


def file_sizes(url: str) -> dict[str, int]:
    """Return {relative name: bytes} of all files below a folder, sorted by name; empty if there is no folder."""
    return {name: version.size for name, version in list_entries(url).items() if version}


def list_entries(url: str) -> dict[str, FileVersion | None]:
    """Return {relative name: version} of all entries below a folder, sorted by name; empty if there is no folder.

    A pipe, socket, device or broken link has no version. Folders are not listed, but their entries are.
    """
    files, path = filesystem(url)
    if not is_remote(url):
        with _as_config_error(url):
            return dict(sorted(_local_entries(path, url))) if os.path.lexists(path) else {}
    with _as_config_error(url):
        infos = files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
    found = ((info.path[len(path) :].lstrip("/"), _version(info)) for info in infos if info.type == fs.FileType.File)
    return dict(sorted(found))


def _version(info: fs.FileInfo) -> FileVersion:
    return FileVersion(info.size, info.mtime_ns or 0)


def _local_entries(root: str, url: str) -> Iterator[tuple[str, FileVersion | None]]:
    """Yield (relative name, version) below a folder; refuse a link to a folder above, which would recurse forever."""
    waiting = [("", frozenset({os.path.realpath(root)}))]
    while waiting:
        folder, above = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                split_url(join(url, name))  # refuses a name that is not text
                try:
                    is_folder, is_file = entry.is_dir(), entry.is_file()
                    if not is_folder:
                        status = entry.stat()
                        yield name, FileVersion(status.st_size, status.st_mtime_ns) if is_file else None
                        continue
                except OSError:  # a link to itself, or a file that was removed meanwhile
                    yield name, None
                    continue
                real = os.path.realpath(entry.path)
                if real in above:
                    raise ConfigError(f"{join(url, name)}: link loop: it leads to a folder above it; remove the link")
                waiting.append((name, above | {real}))


def file_version(url: str) -> FileVersion | None:
    """Return the version of a file; None if it does not exist."""
    files, path = filesystem(url)
    with _as_config_error(url):
        info = files.get_file_info(path)
    return _version(info) if info.type == fs.FileType.File else None


def read_bytes(url: str) -> bytes:
    """Return the content of a file."""
    files, path = filesystem(url)
    check_plain(url)
    with _as_config_error(url), files.open_input_stream(path, compression=None) as stream:
        return stream.read()


def read_json(url: str) -> Any:
    """Return the value of a JSON file."""
    try:
        return json.loads(read_bytes(url).decode())
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{url}: not JSON: {error}") from None


def check_plain(url: str) -> None:
    """Refuse a local folder, pipe or device in place of a file: reading a pipe waits, and a device may never end."""
    if not is_remote(url) and os.path.exists(path := absolute(url)) and not os.path.isfile(path):
        raise ConfigError(f"{url}: a folder, pipe or device; expected a file")


def read_range(url: str, start: int, size: int) -> bytes:
    """Return up to `size` bytes of a file, from byte `start`."""
    files, path = filesystem(url)
    check_plain(url)
    with _as_config_error(url), files.open_input_file(path) as file:
        return file.read_at(size, start)


def write_bytes(url: str, content: bytes) -> None:
    """Replace a file atomically."""
    if is_remote(url):  # an object appears when its upload is complete
        files, path = filesystem(url)
        with _as_config_error(url), files.open_output_stream(path, compression=None) as stream:
            stream.write(content)
    else:
        with atomic_write(url) as temporary:
            temporary.write_bytes(content)


def upload(source: Path, url: str) -> None:
    """Copy a local file to an address, atomically."""
    if is_remote(url):
        files, path = filesystem(url)
        with _as_config_error(url):
            fs.copy_files(str(source.absolute()), path, source_filesystem=_LOCAL, destination_filesystem=files)
    else:
        with atomic_write(url) as temporary:
            shutil.copyfile(source, temporary)


@contextmanager
def atomic_write(url: str) -> Iterator[Path]:
    """Yield a local path to write to; the file appears at `url` only if the block succeeds."""
    final = Path(filesystem(url)[1])
    if is_remote(url):
        with scratch_folder() as folder:
            yield (copy := folder / final.name)
            upload(copy, url)
        return
    with _as_config_error(url):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f"{UNFINISHED}{uuid.uuid4().hex}")
        try:
            yield temporary
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Yield a local path with the file's content: the file itself if it is local."""
    files, path = filesystem(url)
    if not is_remote(url):
        if not Path(path).is_file():
            raise ConfigError(f"{url}: no such file")
        yield Path(path)
        return
    with scratch_folder() as folder:
        copy = folder / path.rpartition("/")[2]
        with _as_config_error(url):
            fs.copy_files(path, str(copy), source_filesystem=files, destination_filesystem=_LOCAL)
        yield copy


def remove(url: str) -> None:
    """Remove a file, or a folder and its content, if it exists."""
    files, path = filesystem(url)
    if is_remote(url):
        bucket, _, key = path.partition("/")
        _remove_objects(bucket, [f"{key}/{name}" for name in list_files(url)] or [key] * exists(url))
        return
    with _as_config_error(url):
        match files.get_file_info(path).type:
            case fs.FileType.File:
                files.delete_file(path)
            case fs.FileType.Directory:
                files.delete_dir(path)


def remove_unfinished(url: str) -> None:
    """Remove the files in a folder, not below it, that killed processes were writing; only its owner may do so."""
    for name in list_files(url):
        if name.startswith(UNFINISHED) and "/" not in name:
            remove(join(url, name))


def _remove_objects(bucket: str, keys: list[str]) -> None:
    # Not with pyarrow: it leaves an empty object in place of the parent folder, which some servers reject.
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = _s3_client()
        for start in range(0, len(keys), 1000):
            objects = [{"Key": key} for key in keys[start : start + 1000]]
            response = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
            for error in response.get("Errors", []):
                raise ConfigError(f"s3://{bucket}/{error.get('Key')}: cannot be removed: {error.get('Message')}")
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"s3://{bucket}: cannot remove {len(keys)} objects: {error}") from None


def abort_uploads(url: str) -> int:
    """Abort incomplete multipart uploads below an address, which are invisible but billed; return their number.

    Call it only for a folder without another writer. If the server does not support listing uploads, or denies it,
    the bucket's lifecycle rule has to abort them.
    """
    if not is_remote(url):
        return 0
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = split_url(url)
    aborted = 0
    with contextlib.suppress(BotoCoreError, ClientError):
        client = _s3_client()
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{key}/"):
            for pending in page.get("Uploads", []):
                client.abort_multipart_upload(Bucket=bucket, Key=pending["Key"], UploadId=pending["UploadId"])
                aborted += 1
    return aborted


def import_boto3() -> Any:
    """Return the boto3 module, without its log lines about the source of credentials."""
    logging.getLogger("botocore").setLevel(logging.WARNING)
    import boto3  # takes a third of a second

    return boto3


def _s3_client() -> Any:
    from botocore.config import Config

    retries: Any = {"mode": "standard", "total_max_attempts": MAX_ATTEMPTS}
    config = Config(connect_timeout=CONNECT_TIMEOUT, read_timeout=REQUEST_TIMEOUT, retries=retries)
    return import_boto3().client("s3", config=config)


@contextmanager
def _as_config_error(url: str) -> Iterator[None]:
    """Turn an error of the storage into one message without a stack trace."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such file, folder or bucket") from None
    except PermissionError as error:
        raise ConfigError(f"{url}: permission denied: {_reason(error)}") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{url}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the text of an error, without its files: they have temporary names."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder; if its disk is full, the error names it and not a file in it."""
    with temporary_folder() as folder:
        try:
            yield folder
        except (ConfigError, RunError):
            raise  # it names what is full
        except Exception as error:  # safetensors has an error class of its own
            if os.strerror(errno.ENOSPC) not in str(error):
                raise
            raise ConfigError(
                f"TMPDIR: the temporary folder {folder.parent}: {os.strerror(errno.ENOSPC)}; expected more space there,"
                " or another folder"
            ) from None
