"""Scoring requests from a file of JSON lines, plain or gzipped, also as oe_eval writes them."""

import gzip
import json
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..exceptions import RequestError

__all__ = ["BadRow", "RequestRow", "read_rows"]

_GZIP_MAGIC = b"\x1f\x8b"
_TEXT, _IDS = ("context", "continuation"), ("context_ids", "continuation_ids")


class RequestRow(NamedTuple):
    """One request.

    Attributes:
        line: Number of its line, from 1.
        context: Text, or token ids.
        continuation: The same for the continuation.
    """

    line: int
    context: str | list[int]
    continuation: str | list[int]


class BadRow(NamedTuple):
    """A line that is no request, and why."""

    line: int
    error: str


def read_rows(path: str | Path) -> Iterator[RequestRow | BadRow]:
    """Read the rows of a file one by one; empty lines are passed over.

    A row is a JSON object with ``context_ids`` and ``continuation_ids`` (lists of integers), or with ``context`` and
    ``continuation`` (texts); where it has both, the ids count. Either pair may also be in its field ``request``, as in
    oe_eval's request files. Other fields do not matter.

    Args:
        path: The file; whether it is gzipped is seen by its first bytes.

    Raises:
        RequestError: If the file cannot be read. A line that is no request is a `BadRow`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp(), "requests.jsonl")
        >>> _ = path.write_text('{"context": "2 + 2 =", "continuation": " 4"}')
        >>> list(read_rows(path))
        [RequestRow(line=1, context='2 + 2 =', continuation=' 4')]
    """
    try:
        with open(path, "rb") as file:
            is_gzipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            lines = gzip.GzipFile(fileobj=file) if is_gzipped else file
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, number)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"the file {str(path)!r} cannot be read: {reason}") from error


def _parse(line: bytes, number: int) -> RequestRow | BadRow:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return BadRow(number, f"is not JSON in UTF-8: {error}")
    if isinstance(row, dict) and isinstance(row.get("request"), dict) and not {_TEXT[0], _IDS[0]} & row.keys():
        row = row["request"]
    if not isinstance(row, dict):
        return BadRow(number, f"is a JSON value of type {type(row).__name__}, not an object")
    names = _IDS if _IDS[0] in row or _IDS[1] in row else _TEXT
    for name in names:
        if name not in row:
            return BadRow(number, f"has no {name!r}; a row has {' and '.join(_TEXT)}, or {' and '.join(_IDS)}")
    if names is _TEXT:
        for name in names:
            if not isinstance(row[name], str):
                return BadRow(number, f"has the {name} {_shortened(row[name])}, which is no text")
        return RequestRow(number, row[_TEXT[0]], row[_TEXT[1]])
    for name in names:
        if not _are_token_ids(row[name]):
            return BadRow(
                number, f"has the {name} {_shortened(row[name])}; token ids are a list of integers from 0 on"
            )
    return RequestRow(number, row[_IDS[0]], row[_IDS[1]])


def _are_token_ids(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    try:
        # The array module looks at every value in C; NumPy would take fractions and texts as well.
        ids = array("i", values)
    except (TypeError, OverflowError):
        return False
    return not ids or int(np.frombuffer(ids, dtype=np.int32).min()) >= 0


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
