"""Keys and values that grow in place, with spare room, without touching what snapshots and forks still see."""

from collections.abc import Sequence
from functools import reduce

import torch

from .state import KeyValues

__all__ = ["GrowingKeyValues"]

# A buffer that is outgrown gets one twentieth of spare room: an append then copies 20 tokens on average, which is
# little beside the reading of all of them that follows, and a fork of many tokens holds at most 5 % more than its own.
_SPARE = 20

# While few tokens are held, a step of one token makes room for an eighth of them, up to this many: else each would
# move.
_SPARE_STEPS = 6


class GrowingKeyValues:
    """The own tokens of one layer: a window ``[start, stop)`` on buffers ``[rows, heads, capacity, head_dim]``.

    Appending writes in place where nobody else can see the place written to; everywhere else (no room, a snapshot
    that reaches further, gradients, a buffer made in inference mode and written outside of it) it moves to a new
    buffer and leaves the old one as it is.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        self._start, self._stop = 0, keys.shape[-2]
        self._frozen = self._stop  # somebody else may see the tokens before this index

    @classmethod
    def copied(cls, segments: Sequence[KeyValues], rows: int, added: int) -> "GrowingKeyValues":
        """Return a new object with copies of ``segments`` for ``rows`` rows, and room for ``added`` further tokens."""
        tokens = sum(segment.tokens for segment in segments)
        buffers = []
        for parts in zip(*segments, strict=True):
            _, heads, _, size = parts[0].shape
            dtype = reduce(torch.promote_types, (part.dtype for part in parts))
            buffer = parts[0].new_empty(rows, heads, _with_room(tokens + added, added), size, dtype=dtype)
            start = 0
            for part in parts:
                buffer.narrow(-2, start, part.shape[-2]).copy_(part)
                start += part.shape[-2]
            buffers.append(buffer)
        result = cls(*buffers)
        result._stop, result._frozen = tokens, 0
        return result

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._stop - self._start

    def view(self) -> KeyValues:
        """Return the tokens held as views ``[rows, heads, tokens, head_dim]``."""
        held = self._stop - self._start
        return KeyValues(self._keys.narrow(-2, self._start, held), self._values.narrow(-2, self._start, held))

    def freeze(self) -> None:
        """Promise never to change the tokens held now: somebody else sees them."""
        self._frozen = max(self._frozen, self._stop)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole buffers, spare room included."""
        return self._keys, self._values

    def continues(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether ``keys`` and ``values`` have the rows, heads and sizes of those held."""
        return _but_tokens(keys) == _but_tokens(self._keys) and _but_tokens(values) == _but_tokens(self._values)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens ``[rows, heads, tokens, head_dim]`` at the end."""
        added = keys.shape[-2]
        if torch.is_grad_enabled() or keys.dtype != self._keys.dtype:  # concatenation promotes, as in Transformers
            held = self.view()
            self._take(torch.cat([held.keys, keys], dim=-2), torch.cat([held.values, values], dim=-2))
            return
        if not self._writable(added):
            self._move(added)
        self._keys.narrow(-2, self._stop, added).copy_(keys)
        self._values.narrow(-2, self._stop, added).copy_(values)
        self._stop += added

    def keep_first(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens held."""
        self._stop = self._start + tokens

    def drop_first(self, tokens: int) -> None:
        """Forget the first ``tokens`` tokens held; their room stays until `give_back_room`, or till it is outgrown."""
        self._start += tokens

    def give_back_room(self) -> None:
        """Move to a smaller buffer where much of the one there is holds nothing any more."""
        room = max(self.tokens // 8, _SPARE_STEPS) + 1
        if self._keys.shape[-2] - self.tokens > room and not torch.is_grad_enabled():
            self._move(0)

    def select(self, rows: torch.Tensor) -> "GrowingKeyValues":
        """Return a new object with copies of ``rows``."""
        held = self.view()
        index = rows.to(held.keys.device)
        return type(self)(held.keys.index_select(0, index), held.values.index_select(0, index))

    def _writable(self, added: int) -> bool:
        return (
            self._stop >= self._frozen
            and self._stop + added <= self._keys.shape[-2]
            and not (self._keys.is_inference() and not torch.is_inference_mode_enabled())
            and not self._keys.requires_grad
        )

    def _move(self, added: int) -> None:
        held = self.view()
        capacity = _with_room(self.tokens + added, added)
        buffers = []
        for tensor in held:
            buffer = self._allocate(tensor, (*tensor.shape[:2], capacity, tensor.shape[-1]))
            buffer[..., : self.tokens, :] = tensor
            buffers.append(buffer)
        tokens = self.tokens
        self._keys, self._values = buffers
        self._start, self._stop, self._frozen = 0, tokens, 0

    def _allocate(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return like.new_empty(shape)

    def _take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        self._start, self._stop = 0, keys.shape[-2]
        self._frozen = self._stop


def _with_room(tokens: int, added: int) -> int:
    """Return how many tokens a buffer for ``tokens`` tokens, the last ``added`` of them new, should hold."""
    return tokens + max(tokens // _SPARE, min(tokens // 8, _SPARE_STEPS) if added == 1 else 0)


def _but_tokens(tensor: torch.Tensor) -> tuple[int, int, int]:
    rows, heads, _, size = tensor.shape
    return rows, heads, size
