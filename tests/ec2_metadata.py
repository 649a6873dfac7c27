"""A stand-in for the metadata service of an EC2 spot instance: ec2_metadata.py PORT SECONDS, until its end."""

import json
import sys
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata(ThreadingHTTPServer):
    """Answers as version 2 of the service does; announces an end `seconds` ahead, or nothing."""

    def __init__(self, port: int, seconds: float | None, quiet: int = 0) -> None:
        """The first `quiet` questions are answered with 404, as long as nothing is announced."""
        super().__init__(("127.0.0.1", port), Answers)
        self.end = None if seconds is None else datetime.now(UTC) + timedelta(seconds=seconds)
        self.quiet = quiet


class Answers(BaseHTTPRequestHandler):
    """Answers to the two questions of a poller."""

    server: Metadata

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply(200 if known else 400, "the token")

    def do_GET(self) -> None:
        self.server.quiet -= 1
        if self.headers["X-aws-ec2-metadata-token"] != "the token":
            self.reply(401, "")
        elif self.path != "/latest/meta-data/spot/instance-action" or self.server.end is None or self.server.quiet >= 0:
            self.reply(404, "")
        else:
            self.reply(200, json.dumps({"action": "terminate", "time": f"{self.server.end:%Y-%m-%dT%H:%M:%SZ}"}))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print no line for each question."""


if __name__ == "__main__":
    server = Metadata(int(sys.argv[1]), float(sys.argv[2]))
    print("up", flush=True)
    server.serve_forever()
