"""The prefixes of one key as a radix tree over token ids."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..layers import AttentionState
from ..snapshot import PrefixSnapshot
from .blocks import Block, cut_blocks, join_blocks
from .entry import Key
from .node import Boundary, Node

__all__ = ["Dropped", "Found", "PrefixTree", "Walk"]


class Walk(NamedTuple):
    """How far a prompt leads into a tree.

    Attributes:
        nodes: The nodes passed; of the last one perhaps only a part.
        length: Tokens in common.
    """

    nodes: list[Node]
    length: int

    @property
    def boundary(self) -> Boundary | None:
        """The boundary at ``length``, if there is one."""
        return self.nodes[-1].boundary if self.nodes and self.nodes[-1].end == self.length else None


class Found(NamedTuple):
    """The longest prefix of a prompt that a tree can give exactly.

    Attributes:
        tree: Where it was found.
        nodes: The nodes that hold it; of the last one perhaps only a part.
        length: Its tokens.
        boundary: Where the states of layers with windows come from, if there are any, and the next logits, if it is at
            ``length``. It may be on another branch.
    """

    tree: "PrefixTree"
    nodes: list[Node]
    length: int
    boundary: Boundary | None


class Dropped(NamedTuple):
    """What left a tree.

    Attributes:
        items: Nodes and boundaries that are no longer part of it.
        nbytes: Bytes freed.
    """

    items: list[Node | Boundary]
    nbytes: int


class PrefixTree:
    """A radix tree of prefixes.

    It keeps this shape: a node without a boundary has at least two children, or else it is a leaf left behind by its
    children (only without windows: with them, a run of tokens is of no use unless a boundary is at or below it).

    Args:
        key: What all prefixes of the tree have in common.
        windows: Window of each layer, None where it has none.
        config: Configuration of the decoder.
    """

    def __init__(self, key: Key, windows: Sequence[int | None], config: PreTrainedConfig) -> None:
        self.key, self.windows, self.config = key, tuple(windows), config
        self.has_windows = any(window is not None for window in windows)
        self.root = Node(np.empty(0, dtype=np.int64), 0, [], "")

    # -- finding -----------------------------------------------------------------------------------------------------

    def walk(self, tokens: np.ndarray) -> Walk:
        """Return how far ``tokens``, int64 ``[n]``, lead into the tree."""
        nodes: list[Node] = []
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            nodes.append(child)
            length += _common(child.tokens, tokens[length:])
            if length < child.end:
                break
            node = child
        return Walk(nodes, length)

    def find(self, tokens: np.ndarray) -> Found:
        """Return the longest prefix of ``tokens`` that can be given exactly; its length may be 0.

        Without windows that is all that `walk` finds. With them it takes a boundary: one at the end of the prefix, or
        one further on, on any branch, whose windows still hold what the shorter prefix needs.
        """
        nodes, length = walk = self.walk(tokens)
        if not self.has_windows:
            return Found(self, nodes, length, walk.boundary)
        while nodes:
            length = min(length, nodes[-1].end)
            boundary = Walk(nodes, length).boundary or nodes[-1].server
            if boundary is not None and boundary.floor <= length:
                return Found(self, nodes, length, boundary)
            nodes = nodes[:-1]
        return Found(self, [], 0, None)

    def snapshot(self, found: Found, input_ids: torch.Tensor) -> PrefixSnapshot:
        """Return what was found. No copy: its tensors are those of the tree, or views of them.

        Args:
            found: What `find` returned; not empty.
            input_ids: Its token ids, int64 ``[1, length]``.
        """
        length, boundary = found.length, found.boundary
        blocks = [block for node in found.nodes for block in node.blocks]
        surplus = found.nodes[-1].end - length
        while surplus and surplus >= blocks[-1].tokens:
            surplus -= blocks.pop().tokens
        if surplus:
            last = blocks.pop()
            tokens = last.tokens - surplus
            blocks.append(Block(tokens, tuple(layer.slice(0, tokens) for layer in last.layers)))
        sliceable = zip(*(block.layers for block in blocks), strict=True)
        windowed = iter(() if boundary is None else boundary.windows)
        return PrefixSnapshot(
            layers=tuple(
                AttentionState(next(sliceable), length) if window is None else next(windowed).crop_to(length)
                for window in self.windows
            ),
            seq_length=length,
            batch_size=1,
            strategy=found.nodes[-1].strategy,
            config=self.config,
            input_ids=input_ids,
            next_logits=boundary.next_logits if boundary is not None and boundary.length == length else None,
            fingerprint=self.key.fingerprint,
            is_lossy=self.key.lossy_strategy is not None,
        )

    # -- changing ----------------------------------------------------------------------------------------------------

    def extend(self, walk: Walk, tokens: np.ndarray, blocks: list[Block], strategy: str) -> Node:
        """Return the node that ends with the last of ``tokens``, made where there is none.

        Args:
            walk: How far ``tokens`` lead into the tree now.
            tokens: Token ids, int64 ``[n]``.
            blocks: Keys and values of the tokens from ``walk.length`` on.
            strategy: Name of the strategy that filled them.
        """
        node = walk.nodes[-1] if walk.nodes else self.root
        if walk.length < node.end:
            node = self._split(node, walk.length)
        if walk.length < len(tokens):
            child = Node(tokens[walk.length :].copy(), walk.length, blocks, strategy)
            node.adopt(child)
            node = child
        return node

    def set_boundary(self, node: Node, boundary: Boundary) -> None:
        """Put ``boundary`` at the end of ``node``."""
        node.boundary, boundary.node = boundary, node
        if self.has_windows:
            for above in node.upwards():
                if above.server is not None and above.server.floor <= boundary.floor:
                    break
                above.server = boundary

    def drop(self, item: Node | Boundary) -> Dropped:
        """Take out a boundary, or a leaf without one, and what is of no use without it."""
        items: list[Node | Boundary] = [item]
        nbytes = item.nbytes
        if isinstance(item, Boundary):
            node = item.node
            self._unset_boundary(node, item)
        else:
            node = self._detach(item)
        while node is not self.root and node.boundary is None:
            if not node.children and self.has_windows:
                items.append(node)
                nbytes += node.nbytes
                node = self._detach(node)
                continue
            if len(node.children) == 1:
                items.append(self._absorb_child(node))
            break
        return Dropped(items, nbytes)

    def _split(self, node: Node, position: int) -> Node:
        """Cut ``node`` in two at ``position`` and return the new node before it."""
        offset, parent = position - node.start, node.parent or self.root
        before, rest = cut_blocks(node.blocks, offset)
        upper = Node(node.tokens[:offset].copy(), node.start, before, node.strategy)
        upper.server = node.server
        node.tokens, node.start, node.blocks = node.tokens[offset:].copy(), position, rest
        parent.adopt(upper)
        upper.adopt(node)
        return upper

    def _absorb_child(self, node: Node) -> Node:
        """Make ``node`` and its only child one; return the child, which is then out of the tree.

        The node survives, since it was used at least as recently.
        """
        (child,) = node.children.values()
        node.blocks = join_blocks(node.blocks, child.blocks)
        node.tokens = np.concatenate([node.tokens, child.tokens])
        node.strategy, node.boundary, node.children = child.strategy, child.boundary, {}
        if node.boundary is not None:
            node.boundary.node = node
        for below in child.children.values():
            node.adopt(below)
        return child

    def _detach(self, node: Node) -> Node:
        """Take the leaf ``node`` out and return its parent."""
        parent = node.parent or self.root
        del parent.children[int(node.tokens[0])]
        return parent

    @staticmethod
    def _unset_boundary(node: Node, boundary: Boundary) -> None:
        node.boundary = None
        for above in node.upwards():
            if above.server is not boundary:
                break
            below = [above.boundary, *(child.server for child in above.children.values())]
            above.server = min(
                (server for server in below if server is not None), key=lambda server: server.floor, default=None
            )


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many first tokens ``left`` and ``right`` have in common."""
    size = min(len(left), len(right))
    unequal = left[:size] != right[:size]
    first = int(unequal.argmax())
    return first if unequal[first] else size
