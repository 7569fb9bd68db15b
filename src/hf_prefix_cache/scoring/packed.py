"""The packed route: the token tree in depth-first order through the model, a chunk at a time, each token once."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..compat import attention_implementation, cache_argument, decoder_config
from .blocks import attention_blocks
from .chunk_size import BatchLimits
from .masks import TreeLayout, packed_attention, tree_layout
from .measured import AttentionChoice, is_measured
from .model_access import input_device
from .probes import Probes
from .tree import TokenTree
from .tree_cache import TreeCache

__all__ = ["chunk_bounds", "score_packed"]

COUNTS_FROM_CACHE = frozenset({"llama4_text"})
"""Architectures that scale attention by a position they count themselves, from the cache's length."""


def chunk_bounds(tree: TokenTree, probed_nodes: np.ndarray, limits: BatchLimits) -> Iterator[tuple[int, int]]:
    """Cut the depth-first order into chunks ``[start, stop)``.

    A chunk may begin anywhere, since the path above it is kept. It ends where the tree branches closest to the root,
    within its last quarter: then the next chunk carries the shortest path. Where the tree starts anew at the root, it
    ends as soon as it has enough tokens.

    Args:
        tree: The tree.
        probed_nodes: Nodes with at least one probe, ascending, ``[n]``.
        limits: How large a chunk is.
    """
    start, size = 0, len(tree)
    roots = np.flatnonzero(tree.depths == 0)
    while start < size:
        probes_before = int(np.searchsorted(probed_nodes, start))
        limit = min(start + limits.max_tokens, size)
        if probes_before + limits.max_probes < len(probed_nodes):
            limit = min(limit, int(probed_nodes[probes_before + limits.max_probes]))
        stop = limit
        next_roots = roots[np.searchsorted(roots, start + limits.enough_tokens) :]
        anew = int(next_roots[0]) if len(next_roots) else size
        if anew <= limit:
            stop = anew
        elif limit < size:
            earliest = limit - (limit - start) // 4
            candidates = np.arange(earliest, limit + 1)
            branches = candidates[tree.depths[candidates] != tree.depths[candidates - 1] + 1]
            if len(branches):
                # The last of equals: the fullest chunk.
                stop = int(branches[::-1][np.argmin(tree.depths[branches[::-1]])])
        yield start, stop
        start = stop


def score_packed(
    model: Any,
    tree: TokenTree,
    probes: Probes,
    *,
    limits: BatchLimits,
    on_tokens: Callable[[int], object],
    on_choice: Callable[[AttentionChoice], object] = lambda _: None,
) -> None:
    """Fill in ``probes`` by feeding every node of ``tree`` once.

    At any time one path from the root and one chunk have keys and values.

    Args:
        model: A model that `packing_obstacle` has nothing against, in evaluation mode.
        tree: The tree of the requests.
        probes: What to read; filled in place.
        limits: Tokens and probed tokens of a chunk at most.
        on_tokens: Called with the number of tokens of each finished chunk.
        on_choice: Called with the way of attention that a layer takes, where ways are measured.
    """
    nodes = tree.nodes_at(probes.rows, probes.depths)
    order = np.argsort(nodes, kind="stable")
    nodes = nodes[order]
    device = input_device(model)
    cache = TreeCache(model.config)
    path = np.zeros(0, dtype=np.int64)
    with packed_attention(attention_implementation(decoder_config(model.config))):
        for start, stop in chunk_bounds(tree, np.unique(nodes), limits):
            begin, end = np.searchsorted(nodes, [start, stop])
            probed, places = np.unique(nodes[begin:end] - start, return_inverse=True)
            logits = _feed(model, tree, cache, path, start, stop, probed, device, on_choice)
            if len(probed):
                probes.read(order[begin:end], logits, places)
            del logits
            path = _advance(tree, cache, path, start, stop)
            on_tokens(stop - start)


def _feed(
    model: Any,
    tree: TokenTree,
    cache: TreeCache,
    path: np.ndarray,
    start: int,
    stop: int,
    probed: np.ndarray,
    device: torch.device,
    on_choice: Callable[[AttentionChoice], object],
) -> torch.Tensor:
    """Return the logits at the ``probed`` places of the chunk, ``[probed, vocab]``."""
    keys = np.concatenate([path, np.arange(start, stop)])
    on_device = [
        torch.as_tensor(values, device=device, dtype=torch.int64)
        for values in (tree.tokens[start:stop], keys, tree.depths[keys], tree.ends[keys])
    ]
    input_ids, key_nodes, key_depths, key_ends = on_device
    layout = TreeLayout(
        key_nodes[len(path) :],
        key_depths[len(path) :],
        key_nodes,
        key_depths,
        key_ends,
        attention_blocks(tree, path, start, stop),
        on_choice if is_measured(device) else None,
    )
    # The start of one row alone is what the model's own masks are made for, and faster with them.
    is_plain_row = len(path) == 0 and int(tree.depths[stop - 1]) == stop - start - 1
    cache.place(layout.query_depths if _counts_from_cache(model) and not is_plain_row else None)
    # Some heads cannot take zero rows, so a chunk without probes still has the logits of one token.
    kept = torch.as_tensor(probed if len(probed) else [0], device=device, dtype=torch.int64)
    with nullcontext() if is_plain_row else tree_layout(layout):
        outputs = model(
            input_ids=input_ids[None],
            position_ids=layout.query_depths[None],
            use_cache=True,
            return_dict=True,
            logits_to_keep=kept,
            **cache_argument(cache),
        )
    return outputs.logits[0]


def _counts_from_cache(model: Any) -> bool:
    return decoder_config(model.config).model_type in COUNTS_FROM_CACHE


def _advance(tree: TokenTree, cache: TreeCache, path: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Keep what the next chunk's first token descends from, and return those nodes."""
    if stop == len(tree):
        return path
    following = tree.ancestors_of(stop)
    kept = int(np.searchsorted(following, start))
    fresh = following[kept:] - start
    cuts = np.flatnonzero(np.diff(fresh) != 1) + 1
    added = [slice(int(piece[0]), int(piece[-1]) + 1) for piece in np.split(fresh, cuts) if len(piece)]
    cache.advance(kept, added)
    return following
