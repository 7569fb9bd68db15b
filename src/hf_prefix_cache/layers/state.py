"""What one attention layer holds at a moment, as an immutable value."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..exceptions import InputMismatchError

__all__ = ["AttentionState", "KeyValues"]


class KeyValues(NamedTuple):
    """Keys and values of a run of tokens: ``[rows, heads, tokens, head_dim]`` each.

    ``rows`` is 1 where every row of a batch holds the same tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.keys.shape[-2]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.keys.device

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, without spare room."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the key and the value of one token in one row."""
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in self)

    def slice(self, start: int, stop: int) -> "KeyValues":
        """Return tokens ``start`` to ``stop`` as views."""
        return KeyValues(self.keys[..., start:stop, :], self.values[..., start:stop, :])

    def select(self, rows: torch.Tensor) -> "KeyValues":
        """Return copies of ``rows``; what a whole batch shares stays shared."""
        if self.rows == 1:
            return self
        index = rows.to(self.keys.device)
        return KeyValues(self.keys.index_select(0, index), self.values.index_select(0, index))

    def check_continued_by(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `InputMismatchError` unless tokens of these ``keys`` and ``values`` can follow."""
        for held, new in zip(self, (keys, values), strict=True):
            if (held.shape[1], held.shape[3]) != (new.shape[1], new.shape[3]):
                raise InputMismatchError(
                    f"the cache holds {held.shape[1]} heads of size {held.shape[3]} and the model adds "
                    f"{new.shape[1]} of size {new.shape[3]}; use a cache made for this model"
                )

    def detach(self) -> "KeyValues":
        """Return the same storage without the autograd graph."""
        return KeyValues(self.keys.detach(), self.values.detach())


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Keys and values of one attention layer, from some first retained token up to ``length``.

    Attributes:
        segments: Runs of tokens in order. Their tensors may be views; nobody writes into them.
        length: Tokens seen, retained or not.
        window: Width of the sliding window or chunk in tokens, the current token included; None where every token is
            attended to.
    """

    segments: tuple[KeyValues, ...]
    length: int
    window: int | None = None

    @property
    def is_sliceable(self) -> bool:
        """Whether every shorter prefix can be taken from it exactly."""
        return self.window is None

    @property
    def kept(self) -> str:
        """What is held, in words."""
        return f"a window of {self.window} tokens and holds them only from token {self.first} on"

    @property
    def first(self) -> int:
        """Position of the first retained token."""
        return self.length - sum(segment.tokens for segment in self.segments)

    @property
    def rows(self) -> int:
        """Rows held: 1 where all segments are shared by a whole batch."""
        return max((segment.rows for segment in self.segments), default=1)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor held."""
        for segment in self.segments:
            yield from segment

    def needed_from(self, length: int) -> int:
        """Return the position of the first token that a next token at ``length`` attends to."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept exactly."""
        return length == 0 or (0 < length <= self.length and self.first <= self.needed_from(length))

    def crop_to(self, length: int) -> "AttentionState":
        """Return the state after the first ``length`` tokens; views, no copy. Ask `can_crop_to` before."""
        return replace(self, segments=_keep(self.segments, self.first, length), length=length)

    def compact(self) -> "AttentionState":
        """Return the same state in one segment with storage of its own, without spare room.

        Segments that are shared by a whole batch are not expanded, unless others are per row.
        """
        if not self.segments:
            return self
        rows = self.rows
        keys, values = (
            torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-2)
            if len(parts) > 1
            else parts[0].clone(memory_format=torch.contiguous_format)
            for parts in ([segment.keys for segment in self.segments], [segment.values for segment in self.segments])
        )
        return replace(self, segments=(KeyValues(keys, values),))

    def select(self, rows: torch.Tensor) -> "AttentionState":
        """Return the state of ``rows``, an index tensor of shape ``[n]``."""
        return replace(self, segments=tuple(segment.select(rows) for segment in self.segments))

    def row(self, index: int, start: int, stop: int) -> "AttentionState":
        """Return row ``index`` without the tokens (its padding) from ``start`` to ``stop``; views."""
        segments, position = [], self.first
        for segment in self.segments:
            row = segment if segment.rows == 1 else KeyValues(*(tensor[index : index + 1] for tensor in segment))
            end = position + segment.tokens
            for first, last in ((position, min(end, start)), (max(position, stop), end)):
                if first < last:
                    segments.append(row.slice(first - position, last - position))
            position = end
        return replace(self, segments=tuple(segments), length=self.length - (stop - start))

    def detach(self) -> "AttentionState":
        """Return the same storage without the autograd graph."""
        return replace(self, segments=tuple(segment.detach() for segment in self.segments))

    def to(self, device: torch.device | str) -> "AttentionState":
        """Return the state with its tensors on ``device``."""
        return replace(
            self,
            segments=tuple(KeyValues(part.keys.to(device), part.values.to(device)) for part in self.segments),
        )


def _keep(segments: tuple[KeyValues, ...], first: int, stop: int) -> tuple[KeyValues, ...]:
    """Return the part of ``segments`` (whose first token has position ``first``) before position ``stop``."""
    kept = []
    for segment in segments:
        if first >= stop:
            break
        kept.append(segment if first + segment.tokens <= stop else segment.slice(0, stop - first))
        first += segment.tokens
    return tuple(kept)
