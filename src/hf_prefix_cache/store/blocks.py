"""Blocks: the keys and values of a few tokens in storage of their own, so that dropping some frees their bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..layers import AttentionState, KeyValues

__all__ = ["BLOCK_TOKENS", "Block", "copy_blocks", "cut_blocks", "join_blocks", "own", "tensor_bytes"]

BLOCK_TOKENS = 256
"""Tokens that a block holds at most: what is copied when a run of tokens is cut in two."""


class Block(NamedTuple):
    """A run of tokens in every layer without a window.

    Attributes:
        tokens: Tokens held, at most `BLOCK_TOKENS`.
        layers: Keys and values ``[1, heads, tokens, head_dim]`` of each such layer.
    """

    tokens: int
    layers: tuple[KeyValues, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(tensor for layer in self.layers for tensor in layer)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all values of ``tensors``: those of their storages, if they were made by `own`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def own(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``parts``, ``[..., tokens, head_dim]`` each, one after the other in storage of their own.

    The result is an ordinary tensor without a graph also inside ``torch.inference_mode()``: what is stored there must
    serve training later.
    """
    with torch.inference_mode(False), torch.no_grad():
        return torch.cat(tuple(parts), dim=-2).contiguous()


def copy_blocks(layers: Sequence[AttentionState], start: int, stop: int) -> list[Block]:
    """Return copies of tokens ``start`` to ``stop`` of ``layers``, which hold all tokens from the first one on."""
    blocks = []
    for first in range(start, stop, BLOCK_TOKENS):
        last = min(first + BLOCK_TOKENS, stop)
        blocks.append(Block(last - first, tuple(_merge(_between(layer.segments, first, last)) for layer in layers)))
    return blocks


def cut_blocks(blocks: Sequence[Block], offset: int) -> tuple[list[Block], list[Block]]:
    """Return the blocks before and from token ``offset`` on; the block that holds both sides is copied."""
    before, position = [], 0
    for index, block in enumerate(blocks):
        if position + block.tokens > offset:
            rest = list(blocks[index:])
            if inside := offset - position:
                before.append(_copy_part(block, 0, inside))
                rest[0] = _copy_part(block, inside, block.tokens)
            return before, rest
        before.append(block)
        position += block.tokens
    return before, []


def join_blocks(before: Sequence[Block], after: Sequence[Block]) -> list[Block]:
    """Return ``before`` and ``after`` as one run; small blocks where they meet become one.

    Cutting leaves a small block on either side. Looking at two blocks of each side keeps any two neighbours above
    `BLOCK_TOKENS` together, but for the first and the last pair of a run, however often it is cut and joined.
    """
    groups: list[list[Block]] = []
    for block in (*before[-2:], *after[:2]):
        if groups and sum(member.tokens for member in groups[-1]) + block.tokens <= BLOCK_TOKENS:
            groups[-1].append(block)
        else:
            groups.append([block])
    joint = [group[0] if len(group) == 1 else _join(group) for group in groups]
    return [*before[:-2], *joint, *after[2:]]


def _join(blocks: Sequence[Block]) -> Block:
    layers = zip(*(block.layers for block in blocks), strict=True)
    return Block(sum(block.tokens for block in blocks), tuple(_merge(parts) for parts in layers))


def _copy_part(block: Block, start: int, stop: int) -> Block:
    return Block(stop - start, tuple(_merge([layer.slice(start, stop)]) for layer in block.layers))


def _merge(parts: Sequence[KeyValues]) -> KeyValues:
    return KeyValues(own([part.keys for part in parts]), own([part.values for part in parts]))


def _between(segments: Sequence[KeyValues], start: int, stop: int) -> list[KeyValues]:
    """Return the parts of ``segments`` that hold tokens ``start`` to ``stop``, as views."""
    parts, position = [], 0
    for segment in segments:
        end = position + segment.tokens
        if position < stop and end > start:
            parts.append(segment.slice(max(0, start - position), min(stop, end) - position))
        position = end
    return parts
