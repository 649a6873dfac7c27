"""The images of an HTTP request: raw bytes, a multipart form, or JSON with base64. Pure functions, no framework."""

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitray.config.serving import Limits
from vitray.errors import cut_middle, printable

MOST_MESSAGE = 500  # characters
MOST_HEADERS = 8192  # bytes, of a part of a form
JSON_FIELDS = {"image", "images", "task", "top_k"}
# Content types of a raw image. curl's --data-binary sends the last one unless it is told otherwise.
RAW_TYPES = ("", "application/octet-stream", "application/x-www-form-urlencoded")


class BadRequest(Exception):  # noqa: N818 (the name of its HTTP status)
    """A request that gets an error as its answer: an HTTP status and one message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(cut_middle(message, MOST_MESSAGE))


class Query(NamedTuple):
    """The task and the number of classes that a request asks for, and its encoded images."""

    task: str | None
    top_k: int | None
    images: list[bytes]


def read_query(parameters: Mapping[str, str], content_type: str, body: bytes, limits: Limits) -> Query:
    """Return the query of a request; its URL parameters take precedence over the fields of its body."""
    if unknown := sorted(parameters.keys() - {"task", "top_k"}):
        raise BadRequest(400, f"got the parameter {unknown[0]}, expected task or top_k")
    if not body:
        raise BadRequest(400, "the body is empty; expected an image, a form with images, or JSON")
    kind = content_type.partition(";")[0].strip().lower()
    fields: dict[str, Any] = {}
    if kind == "application/json":
        fields = _read_json(body, limits)
        images = _images_of_json(fields, limits)
    elif kind == "multipart/form-data":
        images, fields = read_form(content_type, body, limits)
    elif kind.startswith("image/") or kind in RAW_TYPES:
        images = [body]
    else:
        raise BadRequest(415, f"content type: got {kind}, expected image/*, multipart/form-data or application/json")
    _check_count(images, limits)
    if empty := [index for index, image in enumerate(images) if not image]:
        raise BadRequest(400, f"image {empty[0]}: empty")
    task = parameters.get("task", fields.get("task"))
    if task is not None and not isinstance(task, str):
        raise BadRequest(400, f"task: got {type(task).__name__}, expected text")
    return Query(task, _read_top_k(parameters.get("top_k", fields.get("top_k"))), images)


def _check_count(images: Sequence[Any], limits: Limits) -> None:
    if not 1 <= len(images) <= limits.images:
        raise BadRequest(400, f"got {len(images)} images, expected 1 to {limits.images}")


def _read_top_k(value: Any) -> int | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    if isinstance(value, bool | float) or not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise BadRequest(400, f"top_k: got {text[:50]!r}, expected a whole number from 1 on")
    return int(text)


def _read_json(body: bytes, limits: Limits) -> dict[str, Any]:
    # Counted before they are parsed: millions of values take seconds, in which no other thread runs.
    if (values := body.count(b",") + 1) > limits.images + len(JSON_FIELDS):
        raise BadRequest(400, f"JSON: got {values:,} values, expected at most {limits.images} images, task and top_k")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(400, f"JSON: got {type(fields).__name__}, expected an object with image or images")
    if unknown := sorted(fields.keys() - JSON_FIELDS):
        raise BadRequest(400, f"JSON: got the field {unknown[0][:50]!r}, expected image or images, task, top_k")
    return fields


def _images_of_json(fields: dict[str, Any], limits: Limits) -> list[bytes]:
    if ("image" in fields) == ("images" in fields):
        raise BadRequest(400, "JSON: expected either image or images, base64 text")
    texts = fields["images"] if "images" in fields else [fields["image"]]
    if not isinstance(texts, list):
        raise BadRequest(400, f"images: got {type(texts).__name__}, expected a list of base64 text")
    _check_count(texts, limits)
    return [_decode_base64(text, index) for index, text in enumerate(texts)]


def _decode_base64(text: Any, index: int) -> bytes:
    if not isinstance(text, str):
        raise BadRequest(400, f"image {index}: got {type(text).__name__}, expected base64 text")
    try:
        # Some encoders break the text into lines.
        return base64.b64decode(text.encode("ascii").translate(None, b" \t\r\n"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(400, f"image {index}: not base64: {error}") from None


def read_form(content_type: str, body: bytes, limits: Limits) -> tuple[list[bytes], dict[str, Any]]:
    """Return the files of a multipart form in order, and its fields `task` and `top_k` (RFC 7578)."""
    match = re.search(r'boundary=(?:"([^"\r\n]{1,200})"|([^\s;,"]{1,200}))', content_type, re.IGNORECASE)
    if match is None:
        raise BadRequest(400, "multipart/form-data: no boundary in the content type")
    delimiter = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    images, fields = [], {}
    most = limits.images + 2  # task and top_k
    # The first line has no line end before its delimiter.
    _, *parts = (b"\r\n" + body).split(b"\r\n" + delimiter, most + 2)
    if len(parts) > most + 1:  # with the end
        raise BadRequest(400, f"multipart/form-data: more than {most} parts; expected {limits.images} images at most")
    if not parts or not parts[-1].startswith(b"--"):
        raise BadRequest(400, "multipart/form-data: the form has no end")
    for part in parts[:-1]:
        end = part.find(b"\r\n\r\n", 0, MOST_HEADERS)
        head, content = part[: max(end, 0)], part[end + 4 :]
        # From the start of a line: searched anywhere, a line of the same words would take long.
        name = re.search(rb'(?im)^content-disposition:[^\r\n]*?[;\s]name="?([^";\r\n]*)', head)
        if not name:
            raise BadRequest(400, f"multipart/form-data: a part without a name in its first {MOST_HEADERS:,} bytes")
        is_file = re.search(rb"(?im)^content-disposition:[^\r\n]*?;\s*filename", head)
        if name[1] in (b"task", b"top_k") and not is_file:
            fields[name[1].decode()] = content.decode("utf-8", "replace")
        elif is_file or name[1] in (b"image", b"images"):
            images.append(content)
        else:
            raise BadRequest(400, f"multipart/form-data: got the field {name[1][:50]!r}, expected image, task or top_k")
    return images, fields
