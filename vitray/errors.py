"""The two errors that a user sees as one message, the nearest-word hint, and redaction of credentials."""

import difflib
import re
from collections.abc import Iterable


class ConfigError(ValueError):
    """Invalid input; the message says where, got, wanted and nearest."""


class RunError(RuntimeError):
    """A valid request that failed while it ran; the message says why."""


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return `; nearest: <legal word>`, the end of a message about a wrong word, or nothing when none is close."""
    matches = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.5)
    return f"; nearest: {matches[0]}" if matches else ""


_USER = re.compile(r"://[^/\s\"'<>]*@")


def redact(text: str) -> str:
    """Return the text without user names, passwords and tokens in its addresses."""
    return re.sub(r"([?&](?:password|passwd|token|secret)=)[^&\s\"']*", r"\1...", _USER.sub("://", text))


def redact_uri(uri: str) -> str:
    """Return an address without credentials and without its query."""
    return redact(uri).partition("?")[0]


def one_line(error: BaseException) -> str:
    """Return an error in one line, without credentials."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split())[:2000])
