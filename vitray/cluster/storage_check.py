"""The storage preflight check: whether results can be written, read and removed, before anything starts.

A client library reports a wrong key after many seconds, in fifty lines, from a worker. The driver makes the same calls
once, with short time-outs, and reports one message.
"""

import contextlib
import os
import uuid
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from vitray.cluster import session
from vitray.errors import ConfigError, redact, redact_uri
from vitray.system import storage

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

CONTENT = b"vitray checks that it may write here\n"

# Seconds: an endpoint that needs longer for forty bytes is too slow for a training run.
CONNECT_TIMEOUT, READ_TIMEOUT = 2, 5

CHECKSUMS_REFUSED = (
    "refuses uploads with checksums, as some S3-compatible servers do; expected"
    " AWS_REQUEST_CHECKSUM_CALCULATION=when_required and AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
)
# Parts of the errors that pyarrow raises when a server refuses a trailer: its code, or its status.
LENGTH_REQUIRED = ("MissingContentLength", "HTTP status 411")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine"


def check_writable(url: str) -> None:
    """Write, read and remove one small file below `url`; raise a ConfigError if that fails."""
    name = f"{storage.UNFINISHED}{uuid.uuid4().hex}"  # after a kill, the next owner of the folder removes it
    probe = storage.join(url, name)
    if storage.is_remote(url):
        _check_s3_writable(probe)
        return
    check_outlives_job(url)
    try:
        storage.write_bytes(probe, CONTENT)
        storage.remove(probe)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"/{name}", "")) from None


def check_outlives_job(url: str) -> None:
    """Raise a ConfigError if the address is a path in the temporary folder of a submitted job."""
    folder = session.job_dir()
    if (
        folder is not None
        and not storage.is_remote(url)
        and (folder / storage.filesystem(url)[1]).is_relative_to(folder)
    ):
        raise ConfigError(
            f"{url}: lies in the folder of this job, which is removed after it and which other nodes do not see;"
            " expected s3://bucket/key, or an absolute path that all nodes share"
        )


def check_readable(url: str, name: str) -> None:
    """Raise a ConfigError if the file `name` below an S3 address may not be read; a missing file is accepted."""
    if not storage.is_remote(url):
        return
    target = _connect(storage.join(url, name))
    get = {"Bucket": target.bucket, "Key": target.key, "Range": "bytes=0-0"}
    target.call("read", lambda: target.client.get_object(**get)["Body"].close())


def _check_s3_writable(url: str) -> None:
    target = _connect(url)
    address = {"Bucket": target.bucket, "Key": target.key}
    target.call("write", lambda: target.client.put_object(**address, Body=CONTENT))
    try:
        if target.call("read", lambda: target.client.get_object(**address)["Body"].read()) != CONTENT:
            raise ConfigError(f"{target.label}: returns other bytes than were written")
        try:  # runs write through pyarrow, which sends checksums as a trailer of the content
            storage.write_bytes(url, CONTENT)
        except ConfigError as error:
            is_trailer = any(part in str(error) for part in LENGTH_REQUIRED)
            text = f"{target.label}: {CHECKSUMS_REFUSED}" if is_trailer else target.clean(error)
            raise ConfigError(text) from None
    except ConfigError:
        with contextlib.suppress(Exception):  # the first error is the one to report
            target.client.delete_object(**address)
        raise
    target.call("remove", lambda: target.client.delete_object(**address))


class _Target(NamedTuple):
    """An object's address, a client for it, and the secrets that no message may repeat."""

    client: Any
    bucket: str
    key: str
    secrets: tuple[str, ...]

    @property
    def label(self) -> str:
        """The bucket, with its endpoint unless that is AWS."""
        endpoint = redact_uri(self.client.meta.endpoint_url)
        return f"s3://{self.bucket}" + ("" if endpoint.endswith(".amazonaws.com") else f" at {endpoint}")

    def clean(self, text: object) -> str:
        """Return a text in one line of at most 300 characters, without secrets."""
        line = str(text)
        for secret in self.secrets:
            line = line.replace(secret, "...")
        return " ".join(line.split())[:300]

    def call(self, action: str, request: Any) -> Any:
        """Return the result of a request, or raise its error as one message; a missing object reads as None."""
        from botocore import exceptions as boto

        try:
            return request()
        except boto.ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey" and action == "read":
                return None
            text = _explain_response(error, action, self)
        except (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError):
            text = f"cannot be reached; expected {_endpoint_hint()}"
        except (boto.ReadTimeoutError, boto.ConnectionClosedError):
            text = f"accepts connections and does not answer within {READ_TIMEOUT} seconds; expected {_endpoint_hint()}"
        except (boto.BotoCoreError, ValueError) as error:
            text = self.clean(error)
        raise ConfigError(f"{self.label}: {text}")


def _connect(url: str) -> _Target:
    bucket, key = storage.split_url(url)
    for name in ENDPOINT_VARIABLES:
        if redact(os.environ.get(name, "")) != os.environ.get(name, ""):
            raise ConfigError(f"{name}: has a password in it; expected {CREDENTIALS}")
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        boto_session = storage.import_boto3().Session()  # a new one: boto3's default caches credentials
        config = Config(connect_timeout=CONNECT_TIMEOUT, read_timeout=READ_TIMEOUT, retries={"total_max_attempts": 1})
        client = boto_session.client("s3", config=config)
        credentials = boto_session.get_credentials()
        keys = credentials.get_frozen_credentials() if credentials else None
    except ProfileNotFound as error:
        raise ConfigError(f"s3://{bucket}: {error}; expected AWS_PROFILE to be one of ~/.aws/config") from None
    except (BotoCoreError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        if "endpoint" in text.lower():  # several classes, and ValueError
            text = f"not an endpoint; expected http(s)://host:port in {' or '.join(ENDPOINT_VARIABLES)}"
        else:
            text = f"the credentials cannot be used ({text}); expected {CREDENTIALS}, or `aws sso login`"
        raise ConfigError(f"s3://{bucket}: {text}") from None
    if keys is None:
        raise ConfigError(f"s3://{bucket}: no credentials found; expected {CREDENTIALS}")
    secrets = (keys.secret_key, keys.access_key, keys.token)
    return _Target(client, str(bucket), key, tuple(secret for secret in secrets if secret))


def _explain_response(error: "ClientError", action: str, target: _Target) -> str:
    """Return the meaning of a server's error response, and its remedy."""
    metadata, details = error.response.get("ResponseMetadata", {}), error.response.get("Error", {})
    headers, status, code = metadata.get("HTTPHeaders", {}), metadata.get("HTTPStatusCode", 0), details.get("Code", "")
    match code:
        case "NoSuchBucket":
            return "no such bucket, and vitray makes none; expected one that exists (`aws s3 mb` makes one)"
        case "InvalidAccessKeyId":
            return f"the server does not know the access key; expected this endpoint's: {CREDENTIALS}"
        case "SignatureDoesNotMatch":
            return "the secret key does not belong to the access key; expected another AWS_SECRET_ACCESS_KEY or profile"
        case "RequestTimeTooSkewed":
            return f"this machine's clock is {_clock_skew(headers)}; expected one in sync (timedatectl set-ntp true)"
        case "ExpiredToken":
            return "the credentials have expired; expected new ones (`aws sso login`, or a new AWS_SESSION_TOKEN)"
        case "InvalidToken":
            return "the session token is of other credentials; expected AWS_SESSION_TOKEN removed, or of the same keys"
        case "AuthorizationHeaderMalformed" | "PermanentRedirect" | "301":
            region = details.get("Region") or headers.get("x-amz-bucket-region") or "that of the bucket"
            return (
                f"the bucket is in another region than {target.client.meta.region_name}; expected AWS_REGION={region}"
            )
        case "MissingContentLength" | "XAmzContentSHA256Mismatch" | "411":
            return CHECKSUMS_REFUSED
        case "QuotaExceeded" | "XMinioStorageFull":
            return f"is full or over its quota ({code}); expected free space"
    if status == 403:
        permission = {"write": "s3:PutObject", "read": "s3:GetObject", "remove": "s3:DeleteObject"}[action]
        prefix = target.key.rpartition("/")[0]
        path = "/".join(part for part in (target.bucket, prefix, "*") if part)
        return f"may not {action}; expected {permission} on {path} for these credentials ({code}, status {status})"
    if status in (404, 405) or not code:
        return f"does not answer as S3 does ({status}); expected {_endpoint_hint()}"
    if status >= 500:
        return f"the server answers {status} {code}, a fault of its own; try again later"
    return f"cannot {action}: {status} {code}: {target.clean(details.get('Message', ''))}"


def _clock_skew(headers: dict[str, str]) -> str:
    """Return how far this machine's clock is from the server's."""
    try:
        seconds = (datetime.now(UTC) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return "wrong"
    return f"{abs(seconds):,.0f} seconds {'ahead of' if seconds > 0 else 'behind'} the server's"


def _endpoint_hint() -> str:
    """Return the endpoint that is needed, and the variable that sets it."""
    variable = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if variable:
        return f"an S3 server there: {variable} sets the address"
    return "a connection to AWS, or AWS_ENDPOINT_URL of another server"
