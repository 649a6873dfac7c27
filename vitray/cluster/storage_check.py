"""Whether an address can be written, read and cleared, asked before anything starts: what is wrong, and what to do.

A client library tells of a wrong key after many seconds and in fifty lines, from a worker. Here the same calls are made
by the driver, once, with short time-outs, and what they answer is one message.
"""

import contextlib
import os
import uuid
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from vitray import storage
from vitray.cluster import session
from vitray.errors import ConfigError, redact, redact_uri

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

CONTENT = b"written by vitray to see whether it may\n"

# Seconds: an endpoint that needs longer for forty bytes does not carry a training run either.
CONNECT, ANSWER = 2, 5

CHECKSUMS = (
    "refuses uploads with checksums, as some S3-compatible servers do; wanted"
    " AWS_REQUEST_CHECKSUM_CALCULATION=when_required and AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine"


def preflight(url: str) -> None:
    """Put, get and delete one small file below `url`, or say what keeps results from lying there."""
    name = f".vitray-probe-{uuid.uuid4().hex[:12]}"
    if storage.is_remote(url):
        _preflight_s3(url, name)
        return
    lasting(url)
    probe = storage.join(url, name)
    try:
        storage.write_bytes(probe, CONTENT)
        storage.remove(probe)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"/{name}", "")) from None


def lasting(url: str) -> None:
    """Refuse a path inside the temporary folder that a job on a cluster runs in."""
    folder = session.job_folder()
    if folder is not None and (folder / storage.filesystem(url)[1]).is_relative_to(folder):
        raise ConfigError(
            f"{url}: lies in the folder that this job runs in, which is removed after it and which other nodes do not"
            " see; wanted s3://bucket/key, or an absolute path that all nodes share"
        )


def readable(url: str, name: str) -> None:
    """Refuse an S3 address whose file `name` may not be read; whether it is there is not asked."""
    if not storage.is_remote(url):
        return
    at = _open(storage.join(url, name))
    at.ask("read", lambda: at.client.get_object(Bucket=at.bucket, Key=at.key, Range="bytes=0-0")["Body"].close())


def _preflight_s3(url: str, name: str) -> None:
    at = _open(storage.join(url, name))
    place = {"Bucket": at.bucket, "Key": at.key}
    at.ask("write", lambda: at.client.put_object(**place, Body=CONTENT))
    try:
        if at.ask("read", lambda: at.client.get_object(**place)["Body"].read()) != CONTENT:
            raise ConfigError(f"{at.where}: answers with other bytes than were written")
        _check_arrow(at, storage.join(url, name))
    except ConfigError:
        with contextlib.suppress(Exception):  # what was wrong is being said already
            at.client.delete_object(**place)
        raise
    at.ask("remove", lambda: at.client.delete_object(**place))


def _check_arrow(at: "_Place", url: str) -> None:
    # What runs write with is another client, with other habits: it has checksums travel behind the content.
    try:
        storage.write_bytes(url, CONTENT)
    except ConfigError as error:
        if "MissingContentLength" in str(error) or "HTTP status 411" in str(error):
            raise ConfigError(f"{at.where}: {CHECKSUMS}") from None
        raise ConfigError(at.clean(str(error))) from None


class _Place(NamedTuple):
    """An object's address, whom to ask about it, and what must not be repeated."""

    client: Any
    bucket: str
    key: str
    secrets: tuple[str, ...]

    @property
    def where(self) -> str:
        """The bucket, and the endpoint where it is not AWS's own."""
        endpoint = redact_uri(self.client.meta.endpoint_url)
        return f"s3://{self.bucket}" + ("" if endpoint.endswith(".amazonaws.com") else f" at {endpoint}")

    def clean(self, text: object) -> str:
        """What a library or a server said, in one line, without credentials."""
        said = str(text)
        for secret in self.secrets:
            said = said.replace(secret, "...")
        return " ".join(said.split())[:300]

    def ask(self, verb: str, call: Any) -> Any:
        """What a call returns; what it raises, as one message. Nothing at an address is no reason to refuse it."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

        try:
            return call()
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey" and verb == "read":
                return None
            raise ConfigError(f"{self.where}: {_answered(error, verb, self)}") from None
        except (BotoCoreError, HTTPClientError, ValueError) as error:
            raise ConfigError(f"{self.where}: {_raised(error, self.clean(error))}") from None


def _open(url: str) -> _Place:
    bucket, key = storage.address(url)
    for name in ENDPOINTS:
        if redact(os.environ.get(name, "")) != os.environ.get(name, ""):
            raise ConfigError(f"{name}: has a password in it; wanted {CREDENTIALS}")
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        session = storage.import_boto3().Session()  # not boto3's own, which would remember what it once found
        config = Config(connect_timeout=CONNECT, read_timeout=ANSWER, retries={"total_max_attempts": 1})
        client = session.client("s3", config=config)
        found = session.get_credentials()
        known = found.get_frozen_credentials() if found else None
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3://{bucket}: {_raised(error, ' '.join(str(error).split())[:300])}") from None
    secrets = (known.secret_key, known.access_key, known.token) if known else ()
    return _Place(client, str(bucket), key, tuple(secret for secret in secrets if secret))


def _answered(error: "ClientError", verb: str, at: _Place) -> str:
    """What a server's refusal means, and what to do."""
    said, headers = error.response.get("Error", {}), error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    code, status = said.get("Code", ""), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    match code.lower():
        case "nosuchbucket":
            return "no such bucket, and vitray makes none; wanted one that exists (`aws s3 mb` makes one)"
        case "invalidaccesskeyid":
            return f"the server does not know the access key; wanted this endpoint's: {CREDENTIALS}"
        case "signaturedoesnotmatch":
            return "the secret key does not belong to the access key; wanted another AWS_SECRET_ACCESS_KEY or profile"
        case "requesttimetooskewed" | "requestexpired":
            return f"this machine's clock is {_skew(headers)}; wanted a synchronised one (timedatectl set-ntp true)"
        case "expiredtoken" | "expiredtokenexception" | "tokenrefreshrequired":
            return "the credentials have expired; wanted new ones (`aws sso login`, or a new AWS_SESSION_TOKEN)"
        case "invalidtoken":
            return "the session token is of other credentials; wanted AWS_SESSION_TOKEN removed, or of the same keys"
        case "authorizationheadermalformed" | "illegallocationconstraintexception" | "permanentredirect" | "301":
            wanted = said.get("Region") or headers.get("x-amz-bucket-region") or "that of the bucket"
            return f"the bucket is in another region than {at.client.meta.region_name}; wanted AWS_REGION={wanted}"
        case "missingcontentlength" | "xamzcontentsha256mismatch" | "xamzcontentchecksummismatch" | "411":
            return CHECKSUMS
        case "accessdenied" | "allaccessdisabled" | "accountproblem" | "403" | "forbidden" | "unauthorizedaccess":
            action = {"write": "s3:PutObject", "read": "s3:GetObject", "remove": "s3:DeleteObject"}[verb]
            prefix = at.key.rpartition("/")[0]
            target = "/".join(part for part in (at.bucket, prefix, "*") if part)
            return f"may not {verb}; wanted {action} on {target} for the credentials in use ({code}, status {status})"
        case "404" | "405" | "methodnotallowed" | "" if status < 500:
            return f"does not answer as S3 does ({status}); wanted {_endpoint()}"
        case "quotaexceeded" | "entitytoolarge" | "xminiostoragefull" | "507":
            return f"is full or over its quota ({code}); wanted room"
    if status >= 500 or code == "SlowDown":
        return f"the server answers {status} {code}, which is trouble of its own; wanted another try in a while"
    return f"cannot {verb}: {status} {code}: {at.clean(said.get('Message', ''))}"


def _skew(headers: dict[str, str]) -> str:
    """How far this machine's clock is from a server's."""
    try:
        off = (datetime.now(UTC) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return "wrong"
    return f"{abs(off):,.0f} seconds {'ahead of' if off > 0 else 'behind'} the server's"


def _endpoint() -> str:
    """What an endpoint has to be, and which setting says where it is."""
    named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    return f"an S3 server there: {named} says where" if named else "a way to AWS, or AWS_ENDPOINT_URL of another server"


def _raised(error: "BotoCoreError | ValueError", said: str) -> str:
    """What it means that a call got no answer, and what to do; `said` are the error's own words, fit to be shown."""
    match type(error).__name__:
        case "NoCredentialsError":
            return f"no credentials found; wanted {CREDENTIALS}"
        case "PartialCredentialsError":
            return f"half of the credentials is missing ({said}); wanted {CREDENTIALS}"
        case "ProfileNotFound":
            return f"{said}; wanted AWS_PROFILE to be one of ~/.aws/config"
        case "NoRegionError":
            return "no region is set; wanted AWS_REGION, as in AWS_REGION=us-east-1"
        case "EndpointConnectionError" | "ConnectTimeoutError" | "ProxyConnectionError":
            return f"cannot be reached; wanted {_endpoint()}"
        case "ReadTimeoutError" | "ConnectionClosedError":
            return f"accepts connections and does not answer within {ANSWER} seconds; wanted {_endpoint()}"
        case "SSLError":
            return f"its certificate is not trusted, or it does not speak https ({said}); wanted {_endpoint()}"
        case "ParamValidationError":
            return f"not a bucket's name: {said}"
        case "ResponseParserError" | "XMLParseError":
            return f"does not answer as S3 does; wanted {_endpoint()}"
    name = type(error).__name__.lower()
    if "endpoint" in said.lower():
        return f"not an endpoint; wanted http(s)://host:port in {' or '.join(ENDPOINTS)}"
    if "token" in name or "credential" in name:
        return f"the credentials cannot be used ({said}); wanted {CREDENTIALS}, or `aws sso login`"
    return f"{type(error).__name__}: {said}"
