"""Attention of a packed chunk in blocks, so that little of what the mask hides is computed.

A chunk holds many small subtrees below one path, and each token sees only its ancestors. On a CPU, which computes all
that is masked, attention takes a third of the time if every token is multiplied with every key. But what a run of
consecutive nodes sees is the ancestors of its first node and the run itself, since depth-first order puts nothing
else of theirs before it. So queries go in runs of some dozens, each with these keys only; projections still run on
the whole chunk. Heads that share keys are folded into the queries, which saves repeating the keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .tree import TokenTree

__all__ = ["AttentionBlock", "attend_in_blocks", "attention_blocks", "takes_boolean_mask"]

_LEAST, _MOST = 64, 128  # queries of a block; fewer make matrix products too small to be fast
_WORTHWHILE = 0.9  # of the products with every key


class AttentionBlock(NamedTuple):
    """Queries ``[start, stop)`` of a chunk and the places of all keys they may see, ``[keys]`` int64."""

    start: int
    stop: int
    keys: torch.Tensor


def attention_blocks(
    tree: TokenTree, path: np.ndarray, start: int, stop: int, device: torch.device | str = "cpu"
) -> tuple[AttentionBlock, ...]:
    """Cut the chunk ``[start, stop)`` below ``path`` into blocks; none if they would save little."""
    blocks, begin = [], start
    while begin < stop:
        end = min(begin + _MOST, stop)
        if end < stop and end - begin > _LEAST:
            # A block that begins close to the root has few ancestors.
            candidates = np.arange(begin + _LEAST, end + 1)[::-1]
            end = int(candidates[np.argmin(tree.depths[candidates])])
        ancestors = tree.ancestors_of(begin)
        # Keys lie in the cache as the path, whose places are depths, and the chunk behind it.
        above = np.where(ancestors < start, tree.depths[ancestors], len(path) + ancestors - start)
        keys = np.concatenate([above, len(path) + np.arange(begin, end) - start])
        blocks.append(AttentionBlock(begin - start, end - start, torch.from_numpy(keys).to(device)))
        begin = end
    products = sum((block.stop - block.start) * len(block.keys) for block in blocks)
    everything = (stop - start) * (len(path) + stop - start)
    return tuple(blocks) if products <= _WORTHWHILE * everything else ()


def attend_in_blocks(
    attend: Callable[..., Any], blocks: Sequence[AttentionBlock], prepared: dict[Any, Any]
) -> Callable[..., Any]:
    """Return scaled dot-product attention over ``blocks``, with the interface of Transformers' ``attend``.

    Args:
        attend: What is called where blocks do not apply.
        blocks: Blocks of the chunk.
        prepared: Keeps the blocks' additive masks for the layers that share a mask; filled here.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is None or not takes_boolean_mask(query, key, attention_mask, dropout, kwargs):
            return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        heads, kv_heads = query.shape[1], key.shape[1]
        masks = _additive_masks(attention_mask, blocks, heads // kv_heads, query.dtype, prepared)
        pieces = []
        for block, mask in zip(blocks, masks, strict=True):
            folded = query[:, :, block.start : block.stop].reshape(1, kv_heads, -1, query.shape[3])
            keys, values = key.index_select(2, block.keys), value.index_select(2, block.keys)
            piece = torch.nn.functional.scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=scaling
            )
            pieces.append(piece.view(1, heads, block.stop - block.start, value.shape[3]).transpose(1, 2))
        return torch.cat(pieces, dim=1), None

    return attention


def takes_boolean_mask(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, dropout: float, extras: dict[str, Any]
) -> bool:
    """Return whether ``mask`` alone, boolean for one row of tokens, says what attention sees."""
    fits = mask.shape == (1, 1, query.shape[2], key.shape[2]) and mask.dtype == torch.bool
    return fits and not dropout and extras.get("position_bias") is None


def _additive_masks(
    mask: torch.Tensor,
    blocks: Sequence[AttentionBlock],
    repeats: int,
    dtype: torch.dtype,
    prepared: dict[Any, Any],
) -> list[torch.Tensor]:
    """Return each block's mask, ``[1, 1, repeats * queries, keys]``: 0 where visible, else the lowest number."""
    place = id(mask), repeats
    if place not in prepared:
        hidden = torch.finfo(dtype).min
        masks = [
            torch.zeros((), dtype=dtype)
            .where(mask[:, :, block.start : block.stop].index_select(3, block.keys), hidden)
            .repeat(1, 1, repeats, 1)
            for block in blocks
        ]
        # The mask itself is kept too, so that no other one can take its identity meanwhile.
        prepared[place] = mask, masks
    return prepared[place][1]
