"""The forked route: each stretch of the tree once, on a fork of the cache that holds what stands above it.

For models whose state no mask can branch (convolutions, state-space layers) or whose positions follow the order of
rows (ALiBi). Tokens go through the model as they do in plain cached decoding: unpadded, from exactly the state at the
branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..caches import PrefixDynamicCache
from ..compat import cache_argument
from ..sharing import attending
from .chunk_size import BatchLimits
from .forward import read_forward
from .model_access import input_device
from .probes import Probes
from .tree import TokenTree

__all__ = ["Stretch", "score_forked", "stretches"]


class Stretch(NamedTuple):
    """Consecutive nodes ``[start, stop)`` of the tree without a branch inside; ``parent`` is -1 at the root."""

    start: int
    stop: int
    parent: int


def stretches(tree: TokenTree) -> list[Stretch]:
    """Cut the tree at its branches; parents come before children, in depth-first order."""
    cuts: dict[int, set[int]] = {}
    for parent, depth in zip(tree.parents.tolist(), tree.shared.tolist(), strict=True):
        if parent >= 0:
            cuts.setdefault(parent, set()).add(depth)
    found: list[Stretch] = []
    ending_at: dict[int, int] = {}  # last node of a stretch -> its place
    firsts = [*tree.first_nodes.tolist(), len(tree)]
    for row, (shared, above) in enumerate(zip(tree.shared.tolist(), tree.parents.tolist(), strict=True)):
        first, end = firsts[row], firsts[row + 1]
        parent = ending_at[firsts[above] + shared - 1 - int(tree.shared[above])] if above >= 0 else -1
        inner = sorted(first + depth - shared for depth in cuts.get(row, ()))
        for start, stop in zip([first, *inner], [*inner, end], strict=True):
            if stop > start:
                found.append(Stretch(start, stop, parent))
                parent = ending_at[stop - 1] = len(found) - 1
    return found


def score_forked(
    model: Any,
    tree: TokenTree,
    probes: Probes,
    *,
    limits: BatchLimits,
    on_tokens: Callable[[int], object],
) -> None:
    """Fill in ``probes`` by feeding every node of ``tree`` once, on forks of `PrefixDynamicCache`.

    Caches of one path from the root are kept, which share what they have in common. Leaves of equal length below one
    stretch go through the model together.

    Args:
        model: A model that `PrefixDynamicCache` serves, in evaluation mode.
        tree: The tree of the requests.
        probes: What to read; filled in place.
        limits: Tokens and probed tokens of a forward at most, unless one stretch has more.
        on_tokens: Called with the number of tokens of each finished forward.
    """
    _Walk(model, tree, probes, limits, on_tokens).run()


class _Walk:
    """One walk through the tree."""

    def __init__(
        self,
        model: Any,
        tree: TokenTree,
        probes: Probes,
        limits: BatchLimits,
        on_tokens: Callable[[int], object],
    ) -> None:
        self.model, self.tree, self.probes, self.limits, self.on_tokens = model, tree, probes, limits, on_tokens
        self.device: torch.device = input_device(model)
        nodes = tree.nodes_at(probes.rows, probes.depths)
        self.order = np.argsort(nodes, kind="stable")
        self.nodes = nodes[self.order]
        self.stretches = stretches(tree)
        self.children: dict[int, list[int]] = {}
        for place, stretch in enumerate(self.stretches):
            self.children.setdefault(stretch.parent, []).append(place)

    def run(self) -> None:
        """Feed everything, depth first."""
        path: list[tuple[int, PrefixDynamicCache]] = [(-1, PrefixDynamicCache(config=self.model.config))]
        self._feed_leaves(*path[0])
        for place, stretch in enumerate(self.stretches):
            if place not in self.children:
                continue
            while path[-1][0] != stretch.parent:
                path.pop()
            cache = path[-1][1].fork()
            self._feed([place], cache)
            path.append((place, cache))
            self._feed_leaves(place, cache)

    def _feed_leaves(self, place: int, cache: PrefixDynamicCache) -> None:
        by_length: dict[int, list[int]] = {}
        for child in self.children.get(place, ()):
            if child not in self.children:
                by_length.setdefault(self.stretches[child].stop - self.stretches[child].start, []).append(child)
        for length, leaves in by_length.items():
            size = max(1, min(self.limits.max_tokens // length, self.limits.max_probes // length))
            for first in range(0, len(leaves), size):
                batch = leaves[first : first + size]
                self._feed(batch, cache.fork(len(batch)))

    def _feed(self, places: list[int], cache: PrefixDynamicCache) -> None:
        """Feed stretches of equal length, one a row; a long one in pieces."""
        begins = np.asarray([self.stretches[place].start for place in places])
        length = self.stretches[places[0]].stop - self.stretches[places[0]].start
        step = max(1, min(self.limits.max_tokens, self.limits.max_probes))
        for offset in range(0, length, step):
            size = min(step, length - offset)
            starts = begins + offset
            bounds = [np.searchsorted(self.nodes, [start, start + size]) for start in starts]
            asked = [np.arange(begin, end) for begin, end in bounds]
            which = np.concatenate(asked)
            rows = np.repeat(np.arange(len(places)), [len(part) for part in asked])
            with attending(self.model, cache):
                read_forward(
                    self.model,
                    self.tree.tokens[starts[:, None] + np.arange(size)],
                    self.probes,
                    self.order[which],
                    rows,
                    self.nodes[which] - starts[rows],
                    device=self.device,
                    use_cache=True,
                    **cache_argument(cache),
                )
            self.on_tokens(len(places) * size)
