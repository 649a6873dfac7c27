"""The storage preflight check: one message for each fault, without secrets, before anything starts."""

import datetime
import email.utils
import json
import os
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import botocore.exceptions
import pytest

from vitray.cluster.storage_check import check_outlives_job, check_readable, check_writable
from vitray.errors import ConfigError
from vitray.runs.resolve import check_storage
from vitray.system import storage

SECRET = "canary-secret-0123456789"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A new client for each test, with the credentials of the environment only."""
    storage._s3.cache_clear()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    yield
    storage._s3.cache_clear()


def rejection(url, seconds=30):  # a second on an idle machine
    """Return the message about unusable storage, which comes within the given time."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        check_writable(url)
    assert time.monotonic() - began < seconds
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 700
    assert SECRET not in message
    return message


@pytest.mark.parametrize("destination", ["s3://bucket", "s3://bucket/probed/deep/", "local"])
def test_usable_storage_is_left_unchanged(destination, s3_server, tmp_path):
    url = str(tmp_path / "results") if destination == "local" else destination
    before = sorted(storage.list_files(url))
    for _ in range(2):
        check_writable(url)
    assert sorted(storage.list_files(url)) == before


@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        ("s3://mistyped/runs", {}, "no such bucket, and vitray makes none"),
        ("s3://bucket/runs", {"AWS_ACCESS_KEY_ID": "SOMEBODY"}, "does not know the access key"),
        ("s3://bucket/runs", {"AWS_SECRET_ACCESS_KEY": SECRET}, "secret key does not belong to the access key"),
        (
            "s3://bucket/runs",
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            "no credentials found; expected AWS_ACCESS_KEY_ID",
        ),
        (
            "s3://bucket/runs",
            {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": None},
            r"credentials cannot be used \(Partial credentials found",
        ),
        ("s3://bucket/runs", {"AWS_PROFILE": "mistyped"}, "expected AWS_PROFILE to be one of"),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": "nonsense"}, "not an endpoint; expected http"),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": f"http://me:{SECRET}@127.0.0.1:9"}, "has a password in it"),
        (
            "s3://bucket/runs",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            "cannot be reached; expected an S3 server there",
        ),
        (
            "s3://bucket/runs",
            dict.fromkeys(("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"), "when_supported"),
            "refuses uploads with checksums.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        ),
        (f"s3://KEY:{SECRET}@bucket/runs", {}, "an address with keys or options in it"),
        ("s3:///runs", {}, "got the bucket '', expected s3://bucket/key"),
    ],
)
def test_each_fault_of_a_real_server_is_explained(s3_server, monkeypatch, url, environment, message):
    for name, value in environment.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    text = rejection(url)
    assert re.search(message, text), text
    assert not (s3_server / "mistyped").exists()
    assert not list((s3_server / "bucket").rglob(f"{storage.UNFINISHED}*"))


def test_no_message_contains_a_secret_of_the_environment(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET[::-1])
    for url in ("s3://bucket/runs", "s3://mistyped/runs"):
        assert SECRET[::-1] not in rejection(url)


@pytest.mark.parametrize(
    "error",
    [
        botocore.exceptions.CredentialRetrievalError(provider="process", error_msg="no such program"),
        botocore.exceptions.LoginRefreshRequired(),
        botocore.exceptions.NoAuthTokenError(),
        botocore.exceptions.TokenRetrievalError(provider="sso", error_msg="no such token"),
        botocore.exceptions.UnauthorizedSSOTokenError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_unusable_credentials_are_explained(s3_server, monkeypatch, error):
    def client(*_, **__):
        raise error

    monkeypatch.setattr(boto3.Session, "client", client)
    assert "the credentials cannot be used (" in rejection("s3://bucket/runs")


# ---- faults that the real server cannot produce, from a fake one -----------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """Fails requests of one method with a chosen error, and confirms all others."""

    method, status, code, details, skew = "PUT", 403, "AccessDenied", "", 0.0
    content = b""


class FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def date_time_string(self, timestamp=None):
        shifted = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.server.skew)
        return email.utils.format_datetime(shifted, usegmt=True)

    def answer(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "PUT" and body:
            server.content = body
        status, text = 200, server.content if self.command == "GET" else b""
        if self.command == server.method:
            status = server.status
            text = f"<Error><Code>{server.code}</Code>{server.details}<Message>{SECRET}</Message></Error>".encode()
            if server.code == "":
                text = b"<html>a page</html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_GET = do_DELETE = do_HEAD = do_POST = answer  # noqa: N815 (the library's names)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_server(monkeypatch):
    with FakeServer(("127.0.0.1", 0), FakeHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        for name, value in {"ACCESS_KEY_ID": "KEY", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
            monkeypatch.setenv(name, "when_required")
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("method", "status", "code", "message"),
    [
        ("PUT", 403, "AccessDenied", "may not write; expected s3:PutObject on bucket/runs/*"),
        ("GET", 403, "AccessDenied", "may not read; expected s3:GetObject on bucket/runs/*"),
        ("DELETE", 403, "AccessDenied", "may not remove; expected s3:DeleteObject on bucket/runs/*"),
        ("PUT", 400, "ExpiredToken", "the credentials have expired"),
        ("PUT", 403, "InvalidToken", "the session token is of other credentials"),
        ("PUT", 411, "MissingContentLength", "refuses uploads with checksums"),
        ("PUT", 503, "SlowDown", "the server answers 503 SlowDown, a fault of its own"),
        ("PUT", 500, "InternalError", "the server answers 500 InternalError"),
        ("PUT", 403, "QuotaExceeded", "is full or over its quota"),
        ("PUT", 405, "MethodNotAllowed", "does not answer as S3 does (405)"),
        ("PUT", 404, "", "does not answer as S3 does"),
        ("PUT", 418, "Teapot", "cannot write: 418 Teapot: ..."),
    ],
)
def test_each_error_code_is_explained(fake_server, method, status, code, message):
    fake_server.method, fake_server.status, fake_server.code = method, status, code
    assert message in rejection("s3://bucket/runs")


@pytest.mark.parametrize(("skew", "message"), [(-3600.0, "3,6.. seconds ahead of"), (900.0, "[89].. seconds behind")])
def test_a_wrong_clock_is_reported_with_its_offset(fake_server, skew, message):
    fake_server.code, fake_server.skew = "RequestTimeTooSkewed", skew
    text = rejection("s3://bucket/runs")
    assert re.search(f"this machine's clock is {message} the server's", text), text


def test_the_region_of_the_bucket_is_named(fake_server):
    fake_server.status, fake_server.code = 400, "AuthorizationHeaderMalformed"
    fake_server.details = "<Region>eu-west-3</Region>"
    assert "in another region than us-east-1; expected AWS_REGION=eu-west-3" in rejection("s3://bucket/runs")


def test_a_server_that_hangs_is_reported_within_seconds(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for name, value in {"ACCESS_KEY_ID": "KEY", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("vitray.cluster.storage_check.READ_TIMEOUT", 1)
        assert "does not answer within 1 seconds" in rejection("s3://bucket/runs")


# ---- permissions on a simulated AWS ----------------------------------------------------------------------------------


def test_a_missing_permission_is_named(monkeypatch):
    from moto import mock_aws
    from moto.core import set_initial_no_auth_action_count

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with mock_aws():
        import boto3

        boto3.client("s3").create_bucket(Bucket="guarded")
        iam = boto3.client("iam")
        iam.create_user(UserName="reader")
        allowed = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="reader", PolicyName="p", PolicyDocument=document)
        key = iam.create_access_key(UserName="reader")["AccessKey"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        text = set_initial_no_auth_action_count(0)(rejection)("s3://guarded/runs")
        assert "may not write; expected s3:PutObject on guarded/runs/*" in text
        assert key["SecretAccessKey"] not in text


# ---- callers ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_counts_as_readable(s3_server):
    check_readable("s3://bucket/nothing/here", "dataset.json")
    check_readable("/nowhere", "dataset.json")


def test_a_plan_checks_access_to_data_on_s3(s3_server, monkeypatch):
    from vitray.config import load_run
    from vitray.runs.resolve import resolve

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(ConfigError, match="the secret key does not belong to the access key"):
        resolve(load_run(None, ["data.url=s3://bucket/demo"]))


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file/runs: " in rejection(str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match="file/runs"):
        check_storage(str(tmp_path / "file" / "runs"))
    check_outlives_job(str(tmp_path))
