"""The rules that a store keeps after every call, checked one by one."""

from collections.abc import Mapping
from itertools import pairwise

import torch

from ..exceptions import StoreIntegrityError
from ..layers.crops import shortest_crop
from . import page as pages
from .entry import Key, Layout
from .node import Boundary, Node
from .tokens import token_at, token_count
from .tree import PrefixTree

__all__ = ["check_integrity"]


def check_integrity(
    trees: Mapping[Key, Mapping[Layout, PrefixTree]],
    recency: Mapping[Node | Boundary, PrefixTree],
    *,
    nbytes: int,
    entries: int,
    max_bytes: int,
    pinned: set[Boundary],
) -> None:
    """Check tree shape, block sizes, byte accounting, and the order in which things would be evicted.

    Args:
        trees: All trees.
        recency: All nodes and boundaries with their trees, least recently used first.
        nbytes: Bytes that the store believes it holds.
        entries: Boundaries that it believes it holds.
        max_bytes: Its budget.
        pinned: Boundaries that are never evicted.

    Raises:
        StoreIntegrityError: A rule does not hold.
    """
    order = {item: place for place, item in enumerate(recency)}
    storages: dict[int, int] = {}
    found: list[Node | Boundary] = []
    for key, layouts in trees.items():
        _require(bool(layouts), f"no tree under {key}")
        for tree in layouts.values():
            _require(tree.key == key, f"a tree of {tree.key} is filed under {key}")
            _require(bool(tree.root.children), "an empty tree was kept")
            for node in tree.root.downwards():
                found.append(node)
                _check_place(tree, node)
                _check_blocks(tree, node, storages)
                if node.boundary is not None:
                    found.append(node.boundary)
                    _check_boundary(tree, node, node.boundary, storages)
                _check_server(tree, node)
    _require(set(found) == set(recency), "nodes and boundaries in the trees differ from those in line for eviction")
    for item in found:
        if isinstance(item, Node):
            first = [*item.children.values(), *item.items[1:]]
            _require(all(order[other] < order[item] for other in first), "a node is in line before what hangs on it")
            _require(all(recency[other] is recency[item] for other in first), "a node is filed under another tree")
    _require(pinned <= set(found), "what is pinned is not in the trees")
    held = sum(storages.values())
    _require(held == nbytes, f"{held} bytes are held but {nbytes} are accounted for")
    _require(held <= max_bytes, f"{held} bytes are held, more than the budget of {max_bytes}")
    boundaries = sum(isinstance(item, Boundary) for item in found)
    _require(boundaries == entries, f"{boundaries} prefixes end in the trees but {entries} are counted")


def _check_place(tree: PrefixTree, node: Node) -> None:
    parent = node.parent
    _require(token_count(node.tokens) > 0, "a node has no tokens")
    _require(
        parent is not None and parent.children.get(token_at(node.tokens, 0)) is node, "a node is not its parent's"
    )
    _require(parent is not None and parent.end == node.start, "a node does not start where its parent ends")
    if node.boundary is None:
        leaf = not node.children
        _require(len(node.children) != 1, "a node without a boundary has one child")
        _require(not (leaf and tree.needs_boundaries), "a leaf is of no use without a boundary")


def _check_blocks(tree: PrefixTree, node: Node, storages: dict[int, int]) -> None:
    sizes = [block.tokens for block in node.blocks]
    _require(sum(sizes) == token_count(node.tokens), f"blocks of {sizes} tokens hold {token_count(node.tokens)}")
    _require(all(sum(pair) > pages.PAGE_TOKENS for pair in pairwise(sizes[1:-1])), f"blocks {sizes} were not joined")
    for index, block in enumerate(node.blocks):
        page = block.page
        _require(0 <= block.start < block.stop <= page.tokens <= pages.PAGE_TOKENS, "a block is not in its page")
        if block.start:
            before = [] if index or node.parent is None else node.parent.blocks[-1:]
            continued = bool(before) and before[0].page is page and before[0].stop == block.start
            _require(continued, "a part of a page does not follow the part before it")
        if block.stop < page.tokens:
            following = [first for child in node.children.values() for first in child.blocks[:1]]
            starts = [first.start for first in following if first.page is page]
            _require(index == len(node.blocks) - 1 and starts == [block.stop], "a part of a page belongs to no run")
            continue  # its storages are counted where it ends
        stacked = sum(len(stack) for stack in page.stacks)
        _require(stacked == 2 * sum(tree.sliceable), f"a page holds {stacked} keys and values")
        for stack in page.stacks:
            _require(stack.shape[1] == 1 and stack.shape[3] == page.tokens, "a page's tensors differ in size")
            _own_storage(stack, storages)


def _check_boundary(tree: PrefixTree, node: Node, boundary: Boundary, storages: dict[int, int]) -> None:
    _require(boundary.node is node and boundary.length == node.end, "a boundary is not where its node ends")
    _require(len(boundary.states) == len(tree.sliceable) - sum(tree.sliceable), "a boundary has other layers")
    _require(
        boundary.floor == shortest_crop(boundary.states, node.end), "a boundary has another floor than its states"
    )
    for state in boundary.states:
        _require(state.length == node.end and not state.is_sliceable, "a state does not end where its node ends")
        for tensor in state.tensors():
            _own_storage(tensor, storages)
    if boundary.next_logits is not None:
        _own_storage(boundary.next_logits, storages)


def _check_server(tree: PrefixTree, node: Node) -> None:
    if not tree.needs_boundaries:
        _require(node.server is None, "servers are named where none is needed")
        return
    below = [node.boundary, *(child.server for child in node.children.values())]
    candidates = [boundary for boundary in below if boundary is not None]
    lowest = min(boundary.floor for boundary in candidates)
    _require(any(node.server is boundary for boundary in candidates), "a node's server is not at or below it")
    _require(node.server is not None and node.server.floor == lowest, "a node's server is not the lowest")


def _own_storage(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    storage = tensor.untyped_storage()
    size = tensor.numel() * tensor.element_size()
    _require(storage.nbytes() == size, f"a tensor of {size} bytes keeps a storage of {storage.nbytes()}")
    _require(storage.data_ptr() not in storages, "two tensors share a storage")
    storages[storage.data_ptr()] = size


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StoreIntegrityError(f"{otherwise}; this is a defect of hf-prefix-cache: clear the store and report it")
