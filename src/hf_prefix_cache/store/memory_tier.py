"""One kind of memory that prefixes are kept in: radix trees over token ids, within a budget of bytes."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ..snapshot import PrefixSnapshot
from .blocks import copy_blocks
from .entry import Entry, Key, Layout, is_on
from .integrity import check_integrity
from .node import Boundary, Node
from .tree import Found, PrefixTree, Walk

__all__ = ["MemoryTier"]

Spill = Callable[[Key, Layout, Callable[[], PrefixSnapshot]], None]


class MemoryTier:
    """Prefixes in one memory. Not for several threads at once: the store holds a lock.

    Args:
        max_bytes: Budget for the tensors held.
        spill: Is told of each prefix before it is evicted, and how to get it from the tensors that will be freed.
    """

    def __init__(self, max_bytes: int, spill: Spill | None = None) -> None:
        self.max_bytes, self._spill = max_bytes, spill
        self.nbytes = self.entries = 0
        self.counts: Counter[str] = Counter()
        self.trees: dict[Key, dict[Layout, PrefixTree]] = {}
        # Everything that can be evicted with its tree, least recently used first. A node is always used together with
        # those before it and after its boundary, and moved behind them, so the first one has nothing that hangs on it.
        self.recency: OrderedDict[Node | Boundary, PrefixTree] = OrderedDict()
        self._pins: Counter[Boundary] = Counter()

    # -- finding -----------------------------------------------------------------------------------------------------

    def find(
        self, keys: list[Key], tokens: bytes, device: torch.device | None
    ) -> tuple[Found, Layout] | tuple[None, None]:
        """Return the longest prefix of ``tokens`` under ``keys`` that can be given, and the layout of its tree.

        Args:
            keys: Where to look, the best first.
            tokens: Token ids of a prompt.
            device: Where it has to be; None for anywhere.
        """
        best: tuple[Found, Layout] | tuple[None, None] = (None, None)
        for layout, tree in self._trees_of(keys, device):
            found = tree.find(tokens)
            if found.length and (best[0] is None or found.length > best[0].length):
                best = found, layout
        return best

    def shared_tokens(self, keys: list[Key], tokens: bytes, device: torch.device | None) -> int:
        """Return how many first tokens a prefix has in common with one that can be given from its end only."""
        return max(
            (tree.walk(tokens).length for _, tree in self._trees_of(keys, device) if tree.needs_boundaries), default=0
        )

    def take(self, found: Found, input_ids: torch.Tensor) -> PrefixSnapshot:
        """Return what `find` found, and note that it was used now: it and all that it shares are evicted last."""
        self._touch(found.tree, found.nodes[-1], found.boundary)
        with torch.inference_mode(False):  # ids made in inference mode could not be trained on
            return found.tree.snapshot(found, input_ids[:, : found.length].clone())

    def snapshots(self) -> Iterator[tuple[Key, Layout, PrefixSnapshot]]:
        """Yield all prefixes whose end is known, least recently used first."""
        for item, tree in list(self.recency.items()):
            if isinstance(item, Boundary) and item in self.recency:
                yield tree.key, self._layout(tree), _whole(tree, item)

    # -- changing ----------------------------------------------------------------------------------------------------

    def insert(self, key: Key, entry: Entry, snapshot: PrefixSnapshot) -> bool:
        """Keep ``snapshot``, of which ``entry`` is the part to keep; return whether it is kept now.

        What was used least recently makes room, but for what is pinned.
        """
        walk = None if entry.nbytes > self.max_bytes else self._make_room(key, entry)
        if walk is None:
            self.counts["refusals"] += 1
            return False
        # All that may fail for want of memory comes before the tree is touched.
        blocks = copy_blocks(entry.sliceable, walk.length, entry.length)
        boundary = walk.boundary if walk.length == entry.length else None
        known = 0 if boundary is None else boundary.nbytes
        is_new = boundary is None
        if boundary is None:
            boundary = Boundary(entry.length, entry.others)
        if boundary.next_logits is None and entry.next_logits is not None:
            boundary.keep_logits(entry.next_logits)
        tree = self.trees.setdefault(key, {}).setdefault(
            entry.layout, PrefixTree(key, [layer.is_sliceable for layer in snapshot.layers], snapshot.config)
        )
        node = tree.extend(walk, entry.tokens, blocks, snapshot.strategy)
        if is_new:
            tree.set_boundary(node, boundary)
        self._touch(tree, node, boundary)
        self.nbytes += sum(block.nbytes for block in blocks) + boundary.nbytes - known
        self.entries += is_new
        self.counts["insertions"] += 1
        return True

    def evict(self, nbytes: int) -> int:
        """Drop what was used least recently until ``nbytes`` are freed or only pinned prefixes are left."""
        freed = 0
        while freed < nbytes:
            item = self._first_unpinned()
            if item is None:
                break
            tree = self.recency[item]
            if self._spill is not None and isinstance(item, Boundary):
                self._spill(tree.key, self._layout(tree), partial(_whole, tree, item))
            for gone, size in tree.drop(item):
                self._forget(gone, size)
                self.counts["evictions"] += isinstance(gone, Boundary)
                freed += size
            if not tree.root.children:
                self._remove_tree(tree)
        return freed

    def discard(self, fingerprint: str) -> int:
        """Drop everything of the model state ``fingerprint``, pinned or not; return the bytes freed."""
        before = self.nbytes
        for key in [key for key in self.trees if key.fingerprint == fingerprint]:
            for tree in self.trees.pop(key).values():
                for node in tree.root.downwards():
                    for item in node.items:
                        self._forget(item, item.nbytes)
        return before - self.nbytes

    def clear(self) -> None:
        """Drop everything, pinned or not."""
        self.trees.clear()
        self.recency.clear()
        self._pins.clear()
        self.nbytes = self.entries = 0

    def pin(self, key: Key, entry: Entry) -> bool:
        """Never evict a prefix until `unpin`; return whether it is there. Pins are counted."""
        boundary = self._boundary(key, entry)
        if boundary is not None:
            self._pins[boundary] += 1
        return boundary is not None

    def unpin(self, key: Key, entry: Entry) -> bool:
        """Take one `pin` back; return whether there was one."""
        boundary = self._boundary(key, entry)
        if boundary is None or not self._pins[boundary]:
            return False
        self._pins[boundary] -= 1
        self._pins += Counter()  # drops what is counted no longer
        return True

    @property
    def pinned(self) -> int:
        """Prefixes that are pinned."""
        return len(self._pins)

    def check(self) -> None:
        """Check tree shape, block sizes, byte accounting and eviction order.

        Raises:
            StoreIntegrityError: Something is inconsistent.
        """
        check_integrity(
            self.trees,
            self.recency,
            nbytes=self.nbytes,
            entries=self.entries,
            max_bytes=self.max_bytes,
            pinned=set(self._pins),
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_room(self, key: Key, entry: Entry) -> Walk | None:
        """Evict until ``entry`` fits; return how far its tokens lead into what is left, None if it does not fit."""
        while True:
            tree = self.trees.get(key, {}).get(entry.layout)
            walk = Walk([], 0) if tree is None else tree.walk(entry.tokens)
            boundary = walk.boundary if walk.length == entry.length else None
            cost = (entry.length - walk.length) * entry.token_bytes
            cost += entry.end_bytes if boundary is None else 0
            cost += entry.logits_bytes if boundary is None or boundary.next_logits is None else 0
            excess = self.nbytes + cost - self.max_bytes
            if excess <= 0:
                return walk
            # What the entry shares is evicted last, and then all the same: it comes with the snapshot. A run of which
            # it shares only a part waits in line like any other.
            whole = [node for node in walk.nodes if node.end <= walk.length]
            if tree is not None and whole:
                self._touch(tree, whole[-1], boundary)
            if self._first_unpinned() is None:
                return None
            self.evict(excess)

    def _trees_of(self, keys: list[Key], device: torch.device | None) -> Iterator[tuple[Layout, PrefixTree]]:
        for key in keys:
            for layout, tree in self.trees.get(key, {}).items():
                if device is None or is_on(layout, device):
                    yield layout, tree

    def _boundary(self, key: Key, entry: Entry) -> Boundary | None:
        tree = self.trees.get(key, {}).get(entry.layout)
        walk = Walk([], 0) if tree is None else tree.walk(entry.tokens)
        return walk.boundary if walk.length == entry.length else None

    def _layout(self, tree: PrefixTree) -> Layout:
        return next(layout for layout, held in self.trees[tree.key].items() if held is tree)

    def _first_unpinned(self) -> Node | Boundary | None:
        """Return what is first in line and serves no pinned prefix."""
        kept = {item for boundary in self._pins for item in (boundary, *boundary.node.upwards())}
        return next((item for item in self.recency if item not in kept), None)

    def _touch(self, tree: PrefixTree, node: Node, boundary: Boundary | None) -> None:
        """Move ``boundary``, ``node`` and all before them to the end of the line, those before last."""
        chain: list[Node | Boundary] = [] if boundary is None else [boundary, *boundary.node.upwards()]
        for item in (*chain, *node.upwards()):
            self.recency[item] = tree
            self.recency.move_to_end(item)

    def _forget(self, item: Node | Boundary, nbytes: int) -> None:
        del self.recency[item]
        self.nbytes -= nbytes
        if isinstance(item, Boundary):
            self.entries -= 1
            self._pins.pop(item, None)

    def _remove_tree(self, tree: PrefixTree) -> None:
        layouts = self.trees[tree.key]
        del layouts[self._layout(tree)]
        if not layouts:
            del self.trees[tree.key]


def _whole(tree: PrefixTree, boundary: Boundary) -> PrefixSnapshot:
    """Return the prefix that ends at ``boundary``. No copy."""
    nodes = list(boundary.node.upwards())[::-1]
    tokens = np.frombuffer(b"".join(node.tokens for node in nodes), dtype=np.int64).copy()
    with torch.inference_mode(False):
        return tree.snapshot(Found(tree, nodes, boundary.length, boundary), torch.from_numpy(tokens)[None])
