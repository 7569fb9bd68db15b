"""The prefixes of one key as a radix tree over token ids."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from ..layers import AttentionState
from ..snapshot import PrefixSnapshot
from .blocks import Block, cut_blocks, gather_layers, join_blocks
from .entry import Key
from .node import Boundary, Node
from .tokens import common_tokens, first_tokens, token_at, token_count, tokens_from

__all__ = ["Found", "PrefixTree", "Walk"]


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
        boundary: Where the states of layers that cannot be sliced come from, and the next logits, if it is at
            ``length``. It may be on another branch.
    """

    tree: "PrefixTree"
    nodes: list[Node]
    length: int
    boundary: Boundary | None


class PrefixTree:
    """A radix tree of prefixes.

    It keeps this shape: a node without a boundary has at least two children, or else it is a leaf left behind by its
    children (only where every layer can be sliced: else a run of tokens is of no use without a boundary below it).

    Args:
        key: What all prefixes of the tree have in common.
        sliceable: For each layer, whether any run of its tokens can be kept on its own.
        config: Configuration of the decoder.
    """

    def __init__(self, key: Key, sliceable: Sequence[bool], config: PreTrainedConfig) -> None:
        self.key, self.sliceable, self.config = key, tuple(sliceable), config
        self.needs_boundaries = not all(sliceable)
        self.root = Node(b"", 0, [], "")

    # -- finding -----------------------------------------------------------------------------------------------------

    def walk(self, tokens: bytes) -> Walk:
        """Return how far ``tokens`` lead into the tree."""
        nodes: list[Node] = []
        node, length = self.root, 0
        while (child := node.children.get(token_at(tokens, length))) is not None:
            nodes.append(child)
            length += common_tokens(tokens, length, child.tokens)
            if length < child.end:
                break
            node = child
        return Walk(nodes, length)

    def find(self, tokens: bytes) -> Found:
        """Return the longest prefix of ``tokens`` that can be given exactly; its length may be 0.

        Where every layer can be sliced, that is all that `walk` finds. Else it takes a boundary: one at the end of the
        prefix, or one further on, on any branch, whose windows still hold what the shorter prefix needs.
        """
        nodes, length = walk = self.walk(tokens)
        if not self.needs_boundaries:
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
        sliceable = iter(gather_layers((block for node in found.nodes for block in node.blocks), length))
        others = iter(() if boundary is None else boundary.states)
        return PrefixSnapshot(
            layers=tuple(
                AttentionState(next(sliceable), length) if is_sliceable else next(others).crop_to(length)
                for is_sliceable in self.sliceable
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

    def extend(self, walk: Walk, tokens: bytes, blocks: list[Block], strategy: str) -> Node:
        """Return the node that ends with the last of ``tokens``, made where there is none.

        Args:
            walk: How far ``tokens`` lead into the tree now.
            tokens: Token ids of a whole prefix.
            blocks: Keys and values of the tokens from ``walk.length`` on.
            strategy: Name of the strategy that filled them.
        """
        node = walk.nodes[-1] if walk.nodes else self.root
        if walk.length < node.end:
            node = self._split(node, walk.length)
        if walk.length == token_count(tokens):
            return node
        rest = tokens_from(tokens, walk.length)
        if node is not self.root and node.boundary is None and not node.children:  # a leaf left behind goes on
            node.blocks = join_blocks(node.blocks, blocks)
            node.tokens, node.strategy = node.tokens + rest, strategy
            return node
        child = Node(rest, walk.length, blocks, strategy)
        node.adopt(child)
        return child

    def set_boundary(self, node: Node, boundary: Boundary) -> None:
        """Put ``boundary`` at the end of ``node``."""
        node.boundary, boundary.node = boundary, node
        if self.needs_boundaries:
            for above in node.upwards():
                if above.server is not None and above.server.floor <= boundary.floor:
                    break
                above.server = boundary

    def drop(self, item: Node | Boundary) -> Iterator[tuple[Node | Boundary, int]]:
        """Take out a boundary, or a leaf without one, and what is of no use without it.

        Yields:
            What is no longer in the tree, and the bytes freed.
        """
        if isinstance(item, Boundary):
            node = item.node
            self._unset_boundary(node, item)
            yield item, item.nbytes
        else:
            node = self._detach(item)
            yield item, item.nbytes
        while self.needs_boundaries and node is not self.root and node.boundary is None and not node.children:
            leaf, node = node, self._detach(node)
            yield leaf, leaf.nbytes
        if node is not self.root and node.boundary is None and len(node.children) == 1:
            yield self._absorb_child(node), 0

    def _split(self, node: Node, position: int) -> Node:
        """Cut ``node`` in two at ``position`` and return the new node before it."""
        offset, parent = position - node.start, node.parent or self.root
        before, after = cut_blocks(node.blocks, offset)
        upper = Node(first_tokens(node.tokens, offset), node.start, before, node.strategy)
        upper.server = node.server
        node.tokens, node.start, node.blocks = tokens_from(node.tokens, offset), position, after
        parent.adopt(upper)
        upper.adopt(node)
        return upper

    def _absorb_child(self, node: Node) -> Node:
        """Make ``node`` and its only child one; return the child, which is then out of the tree.

        The node survives, since it was used at least as recently.
        """
        (child,) = node.children.values()
        node.blocks = join_blocks(node.blocks, child.blocks)
        node.tokens += child.tokens
        node.strategy, node.boundary, node.children = child.strategy, child.boundary, {}
        if node.boundary is not None:
            node.boundary.node = node
        for below in child.children.values():
            node.adopt(below)
        return child

    def _detach(self, leaf: Node) -> Node:
        """Take ``leaf`` out and return its parent."""
        parent, block = leaf.parent or self.root, leaf.blocks[0]
        if block.start:  # the page stays with those before: give up this part of it
            page = block.page.first(block.start)
            for node in parent.upwards():
                last = node.blocks[-1]
                node.blocks[-1] = last._replace(page=page)
                if not last.start:
                    break
        del parent.children[token_at(leaf.tokens, 0)]
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
