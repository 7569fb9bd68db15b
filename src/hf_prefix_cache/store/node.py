"""The parts of a prefix tree: runs of tokens, and the points where a stored prefix ends."""

import weakref
from collections.abc import Iterator, Sequence

import torch

from ..layers import LayerState
from ..layers.crops import shortest_crop
from .blocks import Block
from .page import tensor_bytes
from .states import copy_state, copy_tensor
from .tokens import token_at, token_count

__all__ = ["Boundary", "Node"]


class Boundary:
    """The end of a stored prefix: what cannot be sliced, in storage of its own.

    Attributes:
        length: Tokens of the prefix.
        states: State of each layer that cannot be sliced.
        next_logits: Logits after the last token, ``[1, vocab]``, or None.
        floor: The shortest length that ``states`` can be cropped to.
    """

    __slots__ = ("__weakref__", "_node", "floor", "length", "next_logits", "states")

    def __init__(self, length: int, states: Sequence[LayerState]) -> None:
        self.length = length
        self.states = tuple(copy_state(state) for state in states)
        self.next_logits: torch.Tensor | None = None
        self.floor = shortest_crop(self.states, length)
        self._node: weakref.ref[Node] | None = None

    @property
    def node(self) -> "Node":
        """The node at whose end it is. A weak reference, so that what leaves the tree is freed at once."""
        if self._node is None or (node := self._node()) is None:
            raise ReferenceError("this boundary is in no tree")
        return node

    @node.setter
    def node(self, node: "Node") -> None:
        self._node = weakref.ref(node)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        states = sum(tensor_bytes(state.tensors()) for state in self.states)
        return states + (0 if self.next_logits is None else tensor_bytes([self.next_logits]))

    def keep_logits(self, logits: torch.Tensor) -> None:
        """Hold a copy of ``logits``, ``[1, vocab]``."""
        self.next_logits = copy_tensor(logits)


class Node:
    """A run of tokens that every prefix below shares.

    Attributes:
        tokens: Token ids as bytes; none at the root only.
        start: Position of the first token.
        blocks: Keys and values of the tokens in the layers that can be sliced.
        strategy: Name of the strategy that filled them.
        children: What may follow, by first token as bytes.
        boundary: The prefix that ends with this node's last token, if one was stored.
        server: The boundary at or below this node that can be cropped to the shortest length; None where every layer
            can be sliced, since no boundary is needed then.
    """

    __slots__ = ("__weakref__", "_parent", "blocks", "boundary", "children", "server", "start", "strategy", "tokens")

    def __init__(self, tokens: bytes, start: int, blocks: list[Block], strategy: str) -> None:
        self.tokens, self.start, self.blocks, self.strategy = tokens, start, blocks, strategy
        self.children: dict[bytes, Node] = {}
        self.boundary: Boundary | None = None
        self.server: Boundary | None = None
        self._parent: weakref.ref[Node] | None = None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + token_count(self.tokens)

    @property
    def parent(self) -> "Node | None":
        """The node before this one; None at the root. A weak reference, so that a dropped tree is freed at once."""
        return None if self._parent is None else self._parent()

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def items(self) -> "list[Node | Boundary]":
        """This node and its boundary, if it has one."""
        return [self] if self.boundary is None else [self, self.boundary]

    def adopt(self, child: "Node") -> None:
        """Make ``child`` a child of this node, in place of one with the same first token."""
        self.children[token_at(child.tokens, 0)] = child
        child._parent = weakref.ref(self)

    def upwards(self) -> "Iterator[Node]":
        """Yield this node and those before it, but for the root."""
        node = self
        while (parent := node.parent) is not None:
            yield node
            node = parent

    def downwards(self) -> "Iterator[Node]":
        """Yield all nodes below this one."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
