"""A place for results is found wanting before anything starts, in one message for each fault, without a secret."""

import datetime
import email.utils
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vitray import storage
from vitray.cluster.storage_check import lasting, preflight, readable
from vitray.errors import ConfigError
from vitray.runs.plan import check_storage

SECRET = "canary-secret-0123456789"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Clients of this test alone; no credentials but those of the environment."""
    storage._s3.cache_clear()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("CONFIG", "SHARED_CREDENTIALS"):
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
    yield
    storage._s3.cache_clear()


def refused(url, seconds=30):  # a second where nothing else runs
    """The one message about a place that cannot be used, said soon."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        preflight(url)
    assert time.monotonic() - began < seconds
    said = str(error.value)
    assert len(said.splitlines()) == 1
    assert len(said) < 700
    assert SECRET not in said
    return said


@pytest.mark.parametrize("place", ["s3://bucket", "s3://bucket/probed/deep/", "local"])
def test_a_good_place_is_left_as_it_was(place, s3_server, tmp_path):
    url = str(tmp_path / "results") if place == "local" else place
    before = sorted(storage.list_files(url))
    for _ in range(2):
        preflight(url)
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
            "no credentials found; wanted AWS_ACCESS_KEY_ID",
        ),
        ("s3://bucket/runs", {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": None}, "half of the credentials"),
        ("s3://bucket/runs", {"AWS_PROFILE": "mistyped"}, "wanted AWS_PROFILE to be one of"),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": "nonsense"}, "not an endpoint; wanted http"),
        ("s3://bucket/runs", {"AWS_ENDPOINT_URL": f"http://me:{SECRET}@127.0.0.1:9"}, "has a password in it"),
        (
            "s3://bucket/runs",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            "cannot be reached; wanted an S3 server there",
        ),
        (
            "s3://bucket/runs",
            dict.fromkeys(("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"), "when_supported"),
            "refuses uploads with checksums.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        ),
        (f"s3://KEY:{SECRET}@bucket/runs", {}, "an address with keys or options in it"),
        ("s3:///runs", {}, "not a bucket's name"),
    ],
)
def test_what_a_real_server_refuses_is_said_with_what_to_do(s3_server, monkeypatch, url, environment, message):
    for name, value in environment.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    import re

    said = refused(url)
    assert re.search(message, said), said
    assert not (s3_server / "mistyped").exists()
    assert not list((s3_server / "bucket").rglob(".vitray-probe*"))


def test_a_secret_of_the_environment_is_in_no_message(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET[::-1])
    for url in ("s3://bucket/runs", "s3://mistyped/runs"):
        assert SECRET[::-1] not in refused(url)


# ---- what that server does not do: one that answers as it is told ----------------------------------------------------


class Answering(ThreadingHTTPServer):
    """Answers requests of a method in a chosen way, and all others as if they had been carried out."""

    method, status, code, said, skew = "PUT", 403, "AccessDenied", "", 0.0
    content = b""


class Answer(BaseHTTPRequestHandler):
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
            text = f"<Error><Code>{server.code}</Code>{server.said}<Message>{SECRET}</Message></Error>".encode()
            if server.code == "":
                text = b"<html>a page</html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_GET = do_DELETE = do_HEAD = do_POST = answer  # noqa: N815 (the library's names)

    def log_message(self, *words):
        pass


@pytest.fixture
def answering(monkeypatch):
    with Answering(("127.0.0.1", 0), Answer) as server:
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
        ("PUT", 403, "AccessDenied", "may not write; wanted s3:PutObject on bucket/runs/*"),
        ("GET", 403, "AccessDenied", "may not read; wanted s3:GetObject on bucket/runs/*"),
        ("DELETE", 403, "AccessDenied", "may not remove; wanted s3:DeleteObject on bucket/runs/*"),
        ("PUT", 400, "ExpiredToken", "the credentials have expired"),
        ("PUT", 403, "InvalidToken", "the session token is of other credentials"),
        ("PUT", 411, "MissingContentLength", "refuses uploads with checksums"),
        ("PUT", 503, "SlowDown", "the server answers 503 SlowDown, which is trouble of its own"),
        ("PUT", 500, "InternalError", "the server answers 500 InternalError"),
        ("PUT", 403, "QuotaExceeded", "is full or over its quota"),
        ("PUT", 405, "MethodNotAllowed", "does not answer as S3 does (405)"),
        ("PUT", 404, "", "does not answer as S3 does"),
        ("PUT", 418, "Teapot", "cannot write: 418 Teapot: ..."),
    ],
)
def test_each_refusal_is_said_with_what_to_do(answering, method, status, code, message):
    answering.method, answering.status, answering.code = method, status, code
    assert message in refused("s3://bucket/runs")


@pytest.mark.parametrize(("skew", "message"), [(-3600.0, "3,6.. seconds ahead of"), (900.0, "[89].. seconds behind")])
def test_a_wrong_clock_is_said_with_how_far_it_is_off(answering, skew, message):
    import re

    answering.code, answering.skew = "RequestTimeTooSkewed", skew
    said = refused("s3://bucket/runs")
    assert re.search(f"this machine's clock is {message} the server's", said), said


def test_another_region_is_named(answering):
    answering.status, answering.code = 400, "AuthorizationHeaderMalformed"
    answering.said = "<Region>eu-west-3</Region>"
    assert "in another region than us-east-1; wanted AWS_REGION=eu-west-3" in refused("s3://bucket/runs")


def test_a_server_that_hangs_is_said_within_seconds(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for name, value in {"ACCESS_KEY_ID": "KEY", "SECRET_ACCESS_KEY": SECRET, "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("vitray.cluster.storage_check.ANSWER", 1)
        assert "does not answer within 1 seconds" in refused("s3://bucket/runs")


# ---- permissions as AWS means them -----------------------------------------------------------------------------------


def test_what_a_policy_withholds_is_named(monkeypatch):
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
        said = set_initial_no_auth_action_count(0)(refused)("s3://guarded/runs")
        assert "may not write; wanted s3:PutObject on guarded/runs/*" in said
        assert key["SecretAccessKey"] not in said


# ---- where it is asked -----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_may_still_be_read(s3_server):
    readable("s3://bucket/nothing/here", "dataset.json")
    readable("/nowhere", "dataset.json")


def test_data_on_s3_is_asked_for_before_it_is_opened(s3_server, monkeypatch):
    from vitray.config import load_run
    from vitray.runs.plan import make_plan

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(ConfigError, match="the secret key does not belong to the access key"):
        make_plan(load_run(None, ["data.url=s3://bucket/demo"]))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file/runs: " in refused(str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match="file/runs"):
        check_storage(str(tmp_path / "file" / "runs"))
    lasting(str(tmp_path))
