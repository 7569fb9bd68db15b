"""Which of many token sequences begins most like a prompt, without a tree: for names of files, not for tensors."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .tokens import common_tokens, token_count

__all__ = ["Indexed", "TokenIndex"]


class Indexed(NamedTuple):
    """A sequence and what it stands for.

    Attributes:
        tokens: Token ids as bytes.
        name: What it stands for.
        floor: Tokens of it that have to be in common at least.
    """

    tokens: bytes
    name: str
    floor: int


class TokenIndex:
    """Sequences in the order of their bytes: those that begin like a prompt stand next to where it would stand."""

    def __init__(self) -> None:
        self._held: list[Indexed] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Indexed]:
        return iter(self._held)

    def add(self, entry: Indexed) -> None:
        """Add a sequence."""
        insort(self._held, entry)

    def remove(self, keep: Callable[[Indexed], bool]) -> None:
        """Remove all that ``keep`` does not hold for."""
        self._held = [entry for entry in self._held if keep(entry)]

    def find(self, tokens: bytes, *, longer_than: int) -> tuple[Indexed, int] | None:
        """Return what has the most first tokens in common with ``tokens``, and how many; None if too few.

        Args:
            tokens: Token ids of a prompt.
            longer_than: Tokens that are known already.
        """
        place = bisect_left(self._held, (tokens,))
        best: tuple[Indexed, int] | None = None
        for side in (range(place - 1, -1, -1), range(place, len(self._held))):
            for entry in map(self._held.__getitem__, side):
                shared = common_tokens(tokens, 0, entry.tokens)
                if shared <= max(longer_than, best[1] if best else 0):
                    break  # further away it is not more
                if shared >= entry.floor:
                    best = entry, min(shared, token_count(entry.tokens))
                    break
        return best
