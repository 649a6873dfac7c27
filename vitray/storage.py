"""The one door to files: a path or an `s3://bucket/key` address, both read and written the same way.

S3 is configured by its standard environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, ...), never by the
address, which ends up in plans and logs. Nothing here creates a bucket.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyarrow import fs

from vitray.errors import ConfigError


def is_remote(url: str) -> bool:
    """Whether the address is S3's rather than a path."""
    return url.startswith("s3://")


def join(url: str, *names: str) -> str:
    """The address of what lies inside `url`."""
    return "/".join([url.rstrip("/"), *names])


def absolute(url: str) -> str:
    """The address as it reads in every folder: Ray's workers run in folders of their own."""
    return url if "://" in url else str(Path(url).expanduser().absolute())


def filesystem(url: str) -> tuple[fs.FileSystem, str]:
    """The file system of an address, and the path on it."""
    bucket, _ = address(url)
    if bucket is not None:
        return _s3(bucket), url.removeprefix("s3://").rstrip("/")
    return _LOCAL, str(Path(url).expanduser().absolute())


def address(url: str) -> tuple[str | None, str]:
    """The bucket of an address, None of a path, and the key or the path; what is neither is refused."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if is_remote(url) and ("@" in bucket or "?" in url):  # not quoted: it would be in logs and plans
        raise ConfigError("s3://: an address with keys or options in it; wanted s3://bucket/key, and the environment")
    if not is_remote(url) and "://" in url:
        raise ConfigError(f"{url}: wanted a path or s3://bucket/key")
    return (bucket, key.rstrip("/")) if is_remote(url) else (None, url)


_LOCAL = fs.LocalFileSystem()

# A server that is away for some seconds, as when it is started again, ends no run: each call is tried so often, with
# growing pauses, half a minute at most where it is refused. Seconds for a connection, and for an answer.
ATTEMPTS, CONNECT, ANSWER = 7, 5, 15


@lru_cache
def _s3(bucket: str) -> fs.FileSystem:
    # Made in each process from the environment, never sent to another: pyarrow forgets retries when it pickles one.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    with _said_clearly(f"s3://{bucket}"):
        return fs.S3FileSystem(
            endpoint_override=endpoint or None,
            region=None if endpoint else fs.resolve_s3_region(bucket),
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
            connect_timeout=CONNECT,
            request_timeout=ANSWER,
        )


def exists(url: str) -> bool:
    """Whether a file is there."""
    files, path = filesystem(url)
    with _said_clearly(url):
        return files.get_file_info(path).type == fs.FileType.File


def list_files(url: str) -> list[str]:
    """The files below a folder, as sorted names relative to it; none where there is no folder."""
    return list(file_sizes(url))


def file_sizes(url: str) -> dict[str, int]:
    """{name relative to the folder: bytes} of the files below it, sorted by name; empty where there is no folder."""
    files, path = filesystem(url)
    with _said_clearly(url):
        found = files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
    sizes = {info.path[len(path) :].lstrip("/"): info.size for info in found if info.type == fs.FileType.File}
    return dict(sorted(sizes.items()))


def read_bytes(url: str) -> bytes:
    """A file's content."""
    files, path = filesystem(url)
    with _said_clearly(url), files.open_input_stream(path, compression=None) as stream:
        return stream.read()


def read_range(url: str, start: int, size: int) -> bytes:
    """`size` bytes of a file from byte `start`; fewer where it ends before."""
    files, path = filesystem(url)
    with _said_clearly(url), files.open_input_file(path) as file:
        return file.read_at(size, start)


def write_bytes(url: str, content: bytes) -> None:
    """Make `content` the file's content: a reader sees the old file or the new one, never a part of it."""
    files, path = filesystem(url)
    with _said_clearly(url):
        if is_remote(url):  # an object appears when its upload is complete
            with files.open_output_stream(path, compression=None) as stream:
                stream.write(content)
            return
        with _aside(Path(path)) as aside:
            aside.write_bytes(content)


def upload(source: Path, url: str) -> None:
    """Copy a local file to an address, where it appears whole."""
    files, path = filesystem(url)
    with _said_clearly(url):
        if is_remote(url):
            fs.copy_files(str(source.absolute()), path, source_filesystem=_LOCAL, destination_filesystem=files)
            return
        with _aside(Path(path)) as aside:
            shutil.copyfile(source, aside)


@contextmanager
def created(url: str) -> Iterator[Path]:
    """A local path to write at; the file appears whole at `url` once the block ends well, and not at all otherwise."""
    _, path = filesystem(url)
    if is_remote(url):
        with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
            yield (copy := Path(folder) / path.rpartition("/")[2])
            upload(copy, url)
        return
    with _said_clearly(url), _aside(Path(path)) as aside:
        yield aside


def remove(url: str) -> None:
    """Remove a file, or a folder with all in it; nothing where there is none."""
    files, path = filesystem(url)
    if is_remote(url):
        bucket, _, key = path.partition("/")
        _remove_objects(bucket, [f"{key}/{name}" for name in list_files(url)] or [key] * exists(url))
        return
    with _said_clearly(url):
        match files.get_file_info(path).type:
            case fs.FileType.File:
                files.delete_file(path)
            case fs.FileType.Directory:
                files.delete_dir(path)


def _remove_objects(bucket: str, keys: list[str]) -> None:
    # pyarrow would leave an empty object for the folder above, which some servers refuse besides.
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = _client()
        for start in range(0, len(keys), 1000):
            objects = [{"Key": key} for key in keys[start : start + 1000]]
            done = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
            for error in done.get("Errors", []):
                raise ConfigError(f"s3://{bucket}/{error.get('Key')}: cannot be removed: {error.get('Message')}")
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(f"s3://{bucket}: cannot remove {len(keys)} objects: {error}") from None


def abort_uploads(url: str) -> int:
    """Abort the uploads below an address that were never completed, which nobody sees and somebody pays; how many.

    For a folder that nobody else writes to. A server that cannot list them, or does not let us, has them aborted by
    the bucket's own rule.
    """
    if not is_remote(url):
        return 0
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = address(url)
    done = 0
    with contextlib.suppress(BotoCoreError, ClientError):
        client = _client()
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{key}/"):
            for found in page.get("Uploads", []):
                client.abort_multipart_upload(Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"])
                done += 1
    return done


def import_boto3() -> Any:
    """boto3, which would tell of where it found credentials in every worker's log."""
    logging.getLogger("botocore").setLevel(logging.WARNING)
    import boto3  # takes a third of a second

    return boto3


def _client() -> Any:
    from botocore.config import Config

    retries: Any = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    return import_boto3().client("s3", config=Config(connect_timeout=CONNECT, read_timeout=ANSWER, retries=retries))


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A local path with the file's content, for libraries that map files: the file itself where it is local."""
    files, path = filesystem(url)
    if not is_remote(url):
        if not Path(path).is_file():
            raise ConfigError(f"{url}: no such file")
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="vitray-") as folder:
        copy = Path(folder) / path.rpartition("/")[2]
        with _said_clearly(url):
            fs.copy_files(path, str(copy), source_filesystem=files, destination_filesystem=_LOCAL)
        yield copy


@contextmanager
def _aside(final: Path) -> Iterator[Path]:
    """A file beside the final one, which it becomes when all went well and vanishes otherwise."""
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        yield aside
        aside.replace(final)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _said_clearly(url: str) -> Iterator[None]:
    """What storage refuses is the user's to mend: one message, without the client library's trace."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such file, folder or bucket") from None
    except PermissionError as error:
        raise ConfigError(f"{url}: permission denied: {error}") from None
    except OSError as error:
        raise ConfigError(f"{url}: {' '.join(str(error).split())}") from None
