"""What a scoring run has finished, in a file beside its output, so that an interrupted run can go on."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..scoring import ContinuationScore
from ..scoring.requests import TokenRequests
from ._console import CommandError

__all__ = ["ScoreProgress", "digest_of", "partial_path"]


class ScoreProgress:
    """Finished portions of a run.

    A context manager, which closes the file. Its first line says what it belongs to. Every other line is one portion,
    written whole: a line that is cut short by a crash counts as not there.

    Args:
        output: The run's output, beside which the file lies; None to keep nothing on disk.
        identity: What the scores depend on; names with their values.

    Attributes:
        scores: One score for each request that is finished, by its index.

    Raises:
        CommandError: If the file belongs to something else, or cannot be read or written.
    """

    def __init__(self, output: Path | None, identity: dict[str, str]) -> None:
        self.path = partial_path(output) if output is not None else None
        self.scores: dict[int, ContinuationScore] = {}
        self._identity = identity
        self._file: BinaryIO | None = None
        if self.path is None:
            return
        try:
            size = self._load() if self.path.exists() else 0
            self._file = open(self.path, "r+b" if size else "wb")  # noqa: SIM115 - closed by `__exit__`
            self._file.truncate(size)
            self._file.seek(size)
            if not size:
                self._write(identity)
        except OSError as error:
            raise CommandError(f"the file {str(self.path)!r} cannot be used: {error.strerror}") from error

    def add(self, indices: Sequence[int], scores: Sequence[ContinuationScore]) -> None:
        """Keep the scores of one portion; when this returns they survive a crash."""
        self.scores |= zip(indices, scores, strict=True)
        if self._file is not None:
            self._write([[index, *score] for index, score in zip(indices, scores, strict=True)])

    def remove(self) -> None:
        """Delete the file, once the output is complete."""
        if self.path is not None:
            self.path.unlink()

    def __enter__(self) -> "ScoreProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, value: Any) -> None:
        file = cast(BinaryIO, self._file)
        file.write(json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())

    def _load(self) -> int:
        """Read what is complete and return its size in bytes."""
        path = self.path
        if path is None:
            return 0
        whole = path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        try:
            first, *portions = (json.loads(line) for line in whole.splitlines())
            for name, value in self._identity.items():
                if first[name] != value:
                    raise CommandError(
                        f"{str(path)!r} belongs to a run with other {name}; name another output, or pass --no-resume "
                        "to start over"
                    )
            for portion in portions:
                for index, logprob, is_greedy, token_logprobs in portion:
                    self.scores[int(index)] = ContinuationScore(logprob, is_greedy, tuple(token_logprobs))
        except (ValueError, KeyError, TypeError) as error:
            if not whole:
                return 0
            raise CommandError(
                f"{str(path)!r} is no file of an interrupted run; move it away, or pass --no-resume to start over"
            ) from error
        return len(whole)


def partial_path(output: Path) -> Path:
    """Return where the unfinished work of a run with this output is kept."""
    return output.with_name(f"{output.name}.partial")


def digest_of(requests: TokenRequests) -> str:
    """Return a digest of all token ids and of where contexts and continuations begin."""
    hasher = hashlib.sha256()
    for array in (requests.tokens, requests.starts, requests.context_lengths):
        hasher.update(np.ascontiguousarray(array).tobytes())
        hasher.update(b"|")
    return hasher.hexdigest()
