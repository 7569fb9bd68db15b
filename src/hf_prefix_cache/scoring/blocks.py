"""Attention of a packed chunk in blocks, so that little of what the mask hides is computed.

A chunk holds many small subtrees below one path, and each token sees only its ancestors. On a CPU, which computes all
that is masked, attention takes a third of the time if every token is multiplied with every key. But what a run of
consecutive nodes sees is the ancestors of its first node and the run itself, since depth-first order puts nothing
else of theirs before it. So queries go in runs of some dozens, each with these keys only; projections still run on
the whole chunk. Heads that share keys are folded into the queries, which saves repeating the keys. Keys that every
query sees are attended to at once, without a mask, and the two parts merged by their log-sum-exp.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..attention.kernels import attend as attend_with_sum
from ..attention.kernels import merge
from .tree import TokenTree

__all__ = [
    "AttentionBlock",
    "attend_in_blocks",
    "attention_blocks",
    "kept_for",
    "seen_by_all",
    "takes_boolean_mask",
]

_LEAST, _MOST = 64, 128  # queries of a block; fewer make matrix products too small to be fast
_WORTHWHILE = 0.9  # of the products with every key
_COMMON = 128  # keys that every query sees from which on attending to them apart pays


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
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        common = seen_by_all(attention_mask, prepared)
        common = common if common >= _COMMON else 0
        masks = _additive_masks(attention_mask, blocks, common, heads // kv_heads, query.dtype, prepared)
        shared = None
        if common:
            folded = query.reshape(1, kv_heads, -1, query.shape[3])
            output, log_sum = attend_with_sum(folded, key[:, :, :common], value[:, :, :common], None, scale)
            shared = output.reshape(1, heads, -1, value.shape[3]), log_sum.reshape(1, heads, -1)
        pieces = []
        for block, mask in zip(blocks, masks, strict=True):
            folded = query[:, :, block.start : block.stop].reshape(1, kv_heads, -1, query.shape[3])
            keys, values = (part.index_select(2, block.keys[common:]) for part in (key, value))
            if shared is None:
                piece = torch.nn.functional.scaled_dot_product_attention(
                    folded, keys, values, attn_mask=mask, scale=scale
                ).view(1, heads, block.stop - block.start, value.shape[3])
            else:
                output, log_sum = attend_with_sum(folded, keys, values, mask, scale)
                own = output.reshape(1, heads, -1, value.shape[3]), log_sum.reshape(1, heads, -1)
                above = shared[0][:, :, block.start : block.stop], shared[1][:, :, block.start : block.stop]
                piece, _ = merge(own, above)
            pieces.append(piece.transpose(1, 2))
        return torch.cat(pieces, dim=1), None

    return attention


def takes_boolean_mask(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, dropout: float, extras: dict[str, Any]
) -> bool:
    """Return whether ``mask`` alone, boolean for one row of tokens, says what attention sees."""
    fits = mask.shape == (1, 1, query.shape[2], key.shape[2]) and mask.dtype == torch.bool
    return fits and not dropout and extras.get("position_bias") is None


def kept_for(mask: torch.Tensor, what: object, prepared: dict[Any, Any], make: Callable[[], Any]) -> Any:
    """Return what ``make`` makes of ``mask``, made once for all layers that share the mask."""
    place = id(mask), what
    if place not in prepared:
        # The mask itself is kept too, so that no other one can take its identity meanwhile.
        prepared[place] = mask, make()
    return prepared[place][1]


def seen_by_all(mask: torch.Tensor, prepared: dict[Any, Any]) -> int:
    """Return how many of the first keys every query sees; not the last one, since merging needs keys on both sides."""

    def make() -> int:
        seen = mask[0, 0].all(dim=0).to(torch.int64).cumprod(dim=0)
        return min(int(seen.sum()), mask.shape[3] - 1)

    return int(kept_for(mask, "seen by all", prepared, make))


def _additive_masks(
    mask: torch.Tensor,
    blocks: Sequence[AttentionBlock],
    common: int,
    repeats: int,
    dtype: torch.dtype,
    prepared: dict[Any, Any],
) -> list[torch.Tensor]:
    """Return each block's mask over all but the ``common`` keys, ``[1, 1, repeats * queries, keys]``.

    It is 0 where a key is visible, else the lowest number: a query that sees no key has a log-sum-exp all the same.
    """

    def make() -> list[torch.Tensor]:
        hidden = torch.finfo(dtype).min
        return [
            torch.zeros((), dtype=dtype, device=mask.device)
            .where(mask[:, :, block.start : block.stop].index_select(3, block.keys[common:]), hidden)
            .repeat(1, 1, repeats, 1)
            for block in blocks
        ]

    masks: list[torch.Tensor] = kept_for(mask, (repeats, dtype), prepared, make)
    return masks
