"""Pages: storage for the keys and values of a few tokens, so that dropping some tokens frees their bytes."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from ..layers import KeyValues

__all__ = ["PAGE_TOKENS", "Page", "tensor_bytes"]

PAGE_TOKENS = 256
"""Tokens that a page holds at most: what is copied when a part of it is given up."""


class Page:
    """Keys and values of a run of tokens in every layer that can be sliced.

    Tensors of one dtype, device and shape are stacked: one tensor for most models, instead of two for every layer,
    which takes less memory where runs are short and less time to slice. They are ordinary tensors without a graph
    also if made inside ``torch.inference_mode()``: what is stored there must serve training later.

    Attributes:
        tokens: Tokens held, at most `PAGE_TOKENS`.
        stacks: The tensors, ``[n, 1, heads, tokens, head_dim]`` each, in storage of their own.
    """

    __slots__ = ("__weakref__", "_groups", "_layers", "stacks", "tokens")

    def __init__(self, stacks: tuple[torch.Tensor, ...], groups: tuple[tuple[int, ...], ...], tokens: int) -> None:
        self.stacks, self.tokens = stacks, tokens
        self._groups = groups  # which of all keys and values, counted layer by layer, each stack holds
        self._layers: list[KeyValues] | None = None

    @classmethod
    def of(cls, layers: Sequence[Sequence[KeyValues]], tokens: int) -> "Page":
        """Return a page with copies of ``tokens`` tokens, given for each layer as parts in order."""
        with torch.inference_mode(False), torch.no_grad():
            flat = [
                parts[0][side] if len(parts) == 1 else torch.cat([part[side] for part in parts], dim=-2)
                for parts in layers
                for side in (0, 1)
            ]
            groups = _group(tuple((part.dtype, part.device, part.shape) for part in flat))
            stacks = tuple(torch.stack([flat[index] for index in group]).contiguous() for group in groups)
        return cls(stacks, groups, tokens)

    @classmethod
    def joined(cls, pages: Sequence["Page"]) -> "Page":
        """Return a page with copies of what ``pages`` hold, one after the other."""
        with torch.inference_mode(False), torch.no_grad():
            stacks = tuple(
                torch.cat(parts, dim=3).contiguous() for parts in zip(*(page.stacks for page in pages), strict=True)
            )
        return cls(stacks, pages[0]._groups, sum(page.tokens for page in pages))

    def first(self, tokens: int) -> "Page":
        """Return a page with copies of the first ``tokens`` tokens."""
        with torch.inference_mode(False), torch.no_grad():
            stacks = tuple(
                stack.narrow(3, 0, tokens).clone(memory_format=torch.contiguous_format) for stack in self.stacks
            )
        return Page(stacks, self._groups, tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.stacks)

    def layers(self, start: int, stop: int) -> list[KeyValues]:
        """Return tokens ``start`` to ``stop`` of each layer, ``[1, heads, tokens, head_dim]``, as views."""
        if stop - start < self.tokens:
            return self._views([stack.narrow(3, start, stop - start) for stack in self.stacks])
        if self._layers is None:
            self._layers = self._views(self.stacks)
        return self._layers

    def _views(self, stacks: Iterable[torch.Tensor]) -> list[KeyValues]:
        found: dict[int, torch.Tensor] = {}
        for group, stack in zip(self._groups, stacks, strict=True):
            found.update(zip(group, stack.unbind(0), strict=True))
        return [KeyValues(found[index], found[index + 1]) for index in range(0, len(found), 2)]


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all values of ``tensors``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@lru_cache(maxsize=1024)
def _group(kinds: tuple[object, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of ``kinds`` that are equal, group by group."""
    groups: dict[object, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return tuple(tuple(group) for group in groups.values())
