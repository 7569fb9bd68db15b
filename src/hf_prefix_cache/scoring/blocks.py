"""Attention of a packed chunk in blocks, so that little of what the mask hides is computed.

A chunk holds many small subtrees below one path, and each token sees only its ancestors. On a CPU, which computes all
that is masked, attention takes a third of the time if every token is multiplied with every key. But what a run of
consecutive nodes sees is the ancestors of its first node and the run itself, since depth-first order puts nothing
else of theirs before it. So queries go in runs of some dozens, each with these keys only; projections still run on
the whole chunk. Heads that share keys are folded into the queries, which saves repeating the keys. Blocks in a row
whose queries all see the same first keys attend to those at once, without a mask, and the two parts are merged by
their log-sum-exp.
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
_KEYS_AT_ONCE = 16  # what is left of the keys beyond a multiple of it costs a CPU as much as some hundred others
# Attending to common keys apart saves their mask, some third of their cost. Measured in keys for which this is even:
_MERGE = 200  # merging, for each query
_CALL = 20_000  # one call more, in products of a query and a key


class AttentionBlock(NamedTuple):
    """Queries ``[start, stop)`` of a chunk, and the stretches of places that hold all keys they may see, ascending."""

    start: int
    stop: int
    keys: tuple[slice, ...]

    @property
    def products(self) -> int:
        """Pairs of a query and a key."""
        return (self.stop - self.start) * sum(stretch.stop - stretch.start for stretch in self.keys)


class _Part(NamedTuple):
    """A block's keys beside its group's common ones, and the additive mask over them, repeated for folded heads."""

    block: AttentionBlock
    keys: tuple[slice, ...]
    mask: torch.Tensor


class _Group(NamedTuple):
    """Blocks in a row whose queries all see the first ``common`` keys."""

    common: int
    parts: list[_Part]


def attention_blocks(tree: TokenTree, path: np.ndarray, start: int, stop: int) -> tuple[AttentionBlock, ...]:
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
        places = np.concatenate([above, len(path) + np.arange(begin, end) - start])
        stretches = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        keys = [slice(int(stretch[0]), int(stretch[-1]) + 1) for stretch in stretches]
        keys = _filled_up(keys, -len(places) % _KEYS_AT_ONCE, len(path) + stop - start)
        blocks.append(AttentionBlock(begin - start, end - start, tuple(keys)))
        begin = end
    products = sum(block.products for block in blocks)
    everything = (stop - start) * (len(path) + stop - start)
    return tuple(blocks) if products <= _WORTHWHILE * everything else ()


def _filled_up(keys: list[slice], missing: int, places: int) -> list[slice]:
    """Widen the last stretch by ``missing`` hidden places where there are as many, first behind it."""
    *others, last = keys
    behind = min(missing, places - last.stop)
    before = min(missing - behind, last.start - others[-1].stop if others else 0)
    return [*others, slice(last.start - before, last.stop + behind)]


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
        repeats = query.shape[1] // key.shape[1]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        mask = attention_mask
        groups = kept_for(mask, (repeats, query.dtype), prepared, lambda: _groups(mask, blocks, repeats, query.dtype))
        pieces = [piece for group in groups for piece in _attend_to_group(query, key, value, group, scale)]
        return torch.cat([piece.transpose(1, 2) for piece in pieces], dim=1), None

    return attention


def _attend_to_group(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: _Group, scale: float
) -> list[torch.Tensor]:
    """Return the output of each block of ``group``, ``[1, heads, queries, value_dim]``."""
    heads, kv_heads, common = query.shape[1], key.shape[1], group.common
    first = group.parts[0].block.start
    if common:
        folded = query[:, :, first : group.parts[-1].block.stop].reshape(1, kv_heads, -1, query.shape[3])
        output, log_sum = attend_with_sum(folded, key[:, :, :common], value[:, :, :common], None, scale)
        shared = output.reshape(1, heads, -1, value.shape[3]), log_sum.reshape(1, heads, -1)
    pieces = []
    for block, keys, mask in group.parts:
        folded = query[:, :, block.start : block.stop].reshape(1, kv_heads, -1, query.shape[3])
        own_keys, own_values = _taken(key, keys, 2), _taken(value, keys, 2)
        if not common:
            piece = torch.nn.functional.scaled_dot_product_attention(
                folded, own_keys, own_values, attn_mask=mask, scale=scale
            ).view(1, heads, -1, value.shape[3])
        else:
            output, log_sum = attend_with_sum(folded, own_keys, own_values, mask, scale)
            own = output.reshape(1, heads, -1, value.shape[3]), log_sum.reshape(1, heads, -1)
            above = [part[:, :, block.start - first : block.stop - first] for part in shared]
            piece = merge((own, (above[0], above[1])))
        pieces.append(piece)
    return pieces


def _taken(tensor: torch.Tensor, stretches: Sequence[slice], dim: int) -> torch.Tensor:
    pieces = [tensor.narrow(dim, stretch.start, stretch.stop - stretch.start) for stretch in stretches]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


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
        return min(_seen_from_first(mask[0, 0]), mask.shape[3] - 1)

    return int(kept_for(mask, "seen by all", prepared, make))


def _groups(mask: torch.Tensor, blocks: Sequence[AttentionBlock], repeats: int, dtype: torch.dtype) -> list[_Group]:
    """Gather blocks in a row whose queries all see about as many first keys, with their masks over the other keys."""
    # Not the last key, since merging needs keys on both sides.
    seen = [
        min(_seen_from_first(mask[0, 0, block.start : block.stop]), block.keys[-1].stop - 1)
        // _KEYS_AT_ONCE
        * _KEYS_AT_ONCE
        for block in blocks
    ]
    groups = []
    for common, start, stop in _gathered(seen, [block.stop - block.start for block in blocks]):
        groups.append(_Group(common, [_part(mask, block, common, repeats, dtype) for block in blocks[start:stop]]))
    return groups


def _gathered(seen: list[int], queries: list[int]) -> list[tuple[int, int, int]]:
    """Cut blocks that see the first ``seen`` keys into groups ``(common, start, stop)`` of the greatest saving."""
    best: list[tuple[int, tuple[int, int, int]]] = [(0, (0, 0, 0))]
    for stop in range(1, len(seen) + 1):
        options, common, together = [], seen[stop - 1], 0
        for start in range(stop - 1, -1, -1):
            common, together = min(common, seen[start]), together + queries[start]
            saved = together * (common - _MERGE) - _CALL
            options.append((best[start][0] + max(saved, 0), (common if saved > 0 else 0, start, stop)))
        best.append(max(options))
    groups, stop = [], len(seen)
    while stop:
        groups.append(best[stop][1])
        stop = groups[-1][1]
    return groups[::-1]


def _part(mask: torch.Tensor, block: AttentionBlock, common: int, repeats: int, dtype: torch.dtype) -> _Part:
    """Mask the keys of ``block`` but the first ``common``, ``[1, 1, repeats * queries, keys]``.

    The mask is 0 where a key is visible, else the lowest number: a query that sees no key has a log-sum-exp all the
    same.
    """
    # The first stretch holds all common keys: none of them is hidden from these queries.
    keys = (slice(common, block.keys[0].stop), *block.keys[1:]) if common else block.keys
    keys = tuple(stretch for stretch in keys if stretch.start < stretch.stop)
    visible = _taken(mask[:, :, block.start : block.stop], keys, 3)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return _Part(block, keys, zero.where(visible, torch.finfo(dtype).min).repeat(1, 1, repeats, 1))


def _seen_from_first(mask: torch.Tensor) -> int:
    """Return how many of the first keys every query sees of ``mask``, ``[queries, keys]``."""
    return int(mask.all(dim=0).to(torch.int64).cumprod(dim=0).sum())
