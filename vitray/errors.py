"""The errors that users see as one message, nearest-word hints, and redaction of credentials."""

import difflib
import re
import unicodedata
from collections.abc import Iterable

LONGEST_MESSAGE = 1400  # characters


class ConfigError(ValueError):
    """Invalid input; the message names the place, the value, the expected value and the nearest match.

    A long message is cut in the middle: its ends hold the place and the expected value. Characters of foreign names
    that would control a terminal are escaped.
    """

    def __init__(self, message: str) -> None:
        lines = cut_middle(message, LONGEST_MESSAGE).split("\n")
        super().__init__(cut_middle("\n".join(map(printable, lines)), LONGEST_MESSAGE))


class RunError(RuntimeError):
    """A valid request that failed while it ran; the message names the cause."""


class OwnershipLost(RuntimeError):  # noqa: N818 (not an error of the program)
    """Another process owns the folder of this run or sweep; the message names it."""


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with ... in place of the middle of a longer one."""
    if len(text) <= most:
        return text
    tail = (most - 3) // 2
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"


def printable(text: str) -> str:
    """Return text with its control characters, line ends and unpaired surrogates as escapes, such as \\x1b."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def odd_character(text: str) -> str | None:
    """Return the first character that one line of text should not have, as U+202E; None without one.

    Such are control characters, line ends, overrides of the direction of writing and unpaired surrogates. Spaces of any
    kind and the joiners of words and emoji (U+200C, U+200D) belong to text, though Python calls them unprintable.
    """
    odd = (c for c in text if not (c.isprintable() or c in "\u200c\u200d" or unicodedata.category(c) == "Zs"))
    return next((f"U+{ord(c):04X}" for c in odd), None)


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return `; nearest: <legal word>` to end an error message, or an empty string if no word is close."""
    matches = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


# Users and passwords before a host. A password may hold slashes, but digits and a slash are a port and a path. Without
# a scheme it needs a colon; image names such as vitray:1@sha256:0f have one, too.
_USERS = (
    re.compile(r"(?<=://)[^/:@\s\"'<>]*:(?!\d{1,5}/)(?:(?!://)[^\s\"'<>])*@"),
    re.compile(r"(?<=://)[^/\s\"'<>]*@"),
    re.compile(r"(?<![\w/.:%+-])[\w.%+-]+:(?!/)[^@\s\"'<>]{1,500}@(?!sha256:)(?=[\w\[])"),
)
# Values of secrets, as in an address, a connection string or an environment: AWS_SECRET_ACCESS_KEY=, X-Amz-Signature=.
# In JSON too: the value ends before the backslash of an escaped quote, but not at other escapes, as in \u00e9.
_SECRET = re.compile(
    r"((?:passw(?:or)?d|pwd|secret|(?<!class_)(?<!distillation_)token|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key"
    r"|signature|credentials?|(?<![a-z])sig)=)(?:[^&\s\"'\\]|\\[u\\])+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return the text without the user names, passwords, keys and tokens of its addresses."""
    for user in _USERS:
        text = user.sub("", text)
    return _SECRET.sub(r"\1...", text)


def redact_uri(uri: str) -> str:
    """Return an address without credentials and query."""
    return redact(uri).partition("?")[0]


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 2,000 characters, without credentials."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:2000]
