"""A file of requests as token ids, with the line that each came from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..integrations.requests_file import BadRow, RequestRow, read_rows
from ..scoring import encode_pairs
from ..scoring.requests import TokenRequests, pack_requests
from ._console import CommandError

__all__ = ["RequestTable", "read_table"]

_BATCH = 1000  # texts that are tokenized together
_NO_PREFIX = "has an empty context, and neither the tokenizer nor the model names a token that begins a text"


@dataclass(frozen=True)
class RequestTable:
    """The requests of a file.

    Attributes:
        requests: Their token ids, in the file's order.
        lines: The line that each came from, ``[requests]``.
        bad: Why each line that is no request is none.
    """

    requests: TokenRequests
    lines: list[int]
    bad: dict[int, str]

    def refuse_bad_lines(self, path: Path, remedy: str = "") -> None:
        """Raise `CommandError`, naming the first bad line, if there is one."""
        if self.bad:
            line = min(self.bad)
            others = f" ({len(self.bad):,} lines are bad)" if len(self.bad) > 1 else ""
            raise CommandError(f"line {line} of {str(path)!r} {self.bad[line]}{others}{remedy}")

    def select(self, chosen: np.ndarray, bad: dict[int, str]) -> "RequestTable":
        """Return the requests for which ``chosen``, ``[requests]`` bool, is true, with more bad lines."""
        lines = [line for line, keep in zip(self.lines, chosen.tolist(), strict=True) if keep]
        return RequestTable(self.requests.select(chosen), lines, self.bad | bad)


def read_table(
    path: Path, *, tokenizer: Callable[[], Any], prefix_token_id: int | None, text_prefix_token_id: int | None = None
) -> RequestTable:
    """Read and encode the requests of a file.

    Args:
        path: The file.
        tokenizer: Returns the tokenizer; called only if there is text.
        prefix_token_id: What an empty context of token ids becomes.
        text_prefix_token_id: What an empty context of text becomes if the tokenizer has no token for it.

    Raises:
        RequestError: If the file cannot be read.
    """
    lines: list[int] = []
    bad: dict[int, str] = {}

    def pairs() -> Iterator[tuple[Any, Any]]:
        rows = iter(tqdm(read_rows(path), desc="Reading", unit=" rows", disable=None, leave=False))
        while batch := list(islice(rows, _BATCH)):
            for row, context, continuation in _encoded(batch, bad, tokenizer, text_prefix_token_id):
                if len(context) == 0 and len(continuation) and prefix_token_id is None:
                    bad[row.line] = _NO_PREFIX
                    continue
                lines.append(row.line)
                yield context, continuation

    return RequestTable(pack_requests(pairs(), prefix_token_id=prefix_token_id), lines, bad)


def _encoded(
    rows: list[RequestRow | BadRow], bad: dict[int, str], tokenizer: Callable[[], Any], text_prefix: int | None
) -> Iterator[tuple[RequestRow, Any, Any]]:
    good: list[RequestRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            bad[row.line] = row.error
        else:
            good.append(row)
    texts = [row for row in good if isinstance(row.context, str)]
    encoded: Iterator[Any] = iter(())
    if texts:
        known = tokenizer()
        prefix = next((t for t in (known.bos_token_id, known.eos_token_id, text_prefix) if t is not None), None)
        if prefix is None:
            bad |= {row.line: _NO_PREFIX for row in texts if not str(row.context).strip()}
        pairs = [(str(row.context), str(row.continuation)) for row in texts if row.line not in bad]
        encoded = iter(encode_pairs(known, pairs, prefix_token_id=prefix))
    for row in good:
        if row.line not in bad:
            yield (row, *next(encoded)) if isinstance(row.context, str) else (row, row.context, row.continuation)
