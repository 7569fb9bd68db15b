"""The sanity check notices what it is there for."""

import pytest
import torch
from store_prefixes import FULL, MIXED, make_snapshot

from hf_prefix_cache.exceptions import StoreIntegrityError
from hf_prefix_cache.layers import KeyValues
from hf_prefix_cache.store import PrefixStore
from hf_prefix_cache.store.blocks import Block
from hf_prefix_cache.store.node import Node


def branching_store(kinds):
    store = PrefixStore(max_bytes=1_000_000)
    tokens = list(range(300))
    for cut in (100, 290, 50):
        store.insert(make_snapshot([*tokens[:cut], 999], kinds, logits=True))
    store.insert(make_snapshot(tokens, kinds))
    store.sanity_check()
    (tree,) = next(iter(store._memory.trees.values())).values()
    return store, tree, next(iter(tree.root.children.values()))


def lose_bytes(store, tree, node):
    store._memory.nbytes -= 1


def forget_an_entry(store, tree, node):
    store._memory.entries -= 1


def lose_recency(store, tree, node):
    store._memory.recency.popitem()


def reverse_recency(store, tree, node):
    for item in list(store._memory.recency):
        store._memory.recency.move_to_end(item, last=False)


def misfile_the_tree(store, tree, node):
    tree.key = tree.key._replace(namespace="elsewhere")


def keep_an_empty_tree(store, tree, node):
    tree.root.children.clear()


def lose_a_child(store, tree, node):
    del store._memory.recency[node.children.popitem()[1]]


def misfile_a_child(store, tree, node):
    node.children[b"elsewhere"] = node.children.popitem()[1]


def shift_a_node(store, tree, node):
    node.start += 1


def lose_a_block(store, tree, node):
    next(node.downwards()).blocks.pop()


def hold_a_view(store, tree, node):
    leaf = next(leaf for leaf in node.downwards() if not leaf.children and leaf.blocks[-1].is_whole)
    keys, values = leaf.blocks[-1].page.stacks
    leaf.blocks[-1].page.stacks = (torch.cat([keys, keys])[: len(keys)], values)


def hold_a_page_twice(store, tree, node):
    leaves = [leaf for leaf in node.downwards() if not leaf.children and leaf.blocks[-1].is_whole]
    leaves[0].blocks[-1] = leaves[1].blocks[-1]


def leave_a_part_of_a_page(store, tree, node):
    leaf = next(leaf for leaf in node.downwards() if leaf.blocks[0].start)
    block = leaf.blocks[0]
    leaf.blocks[0] = Block(block.page.first(block.page.tokens), block.start, block.stop)


def move_a_boundary(store, tree, node):
    boundary = next(below.boundary for below in node.downwards() if below.boundary)
    boundary.length += 1


def exceed_the_budget(store, tree, node):
    store._memory.max_bytes = 1


COMMON = [
    value for value in list(globals().values()) if callable(value) and getattr(value, "__module__", "") == __name__
]
DEFECTS = [defect for defect in COMMON if defect is not branching_store]


@pytest.mark.parametrize("kinds", [FULL, MIXED], ids=["full", "windows"])
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_noticed(defect, kinds):
    store, tree, node = branching_store(kinds)
    defect(store, tree, node)
    with pytest.raises(StoreIntegrityError, match="defect of hf-prefix-cache"):
        store.sanity_check()


def test_a_chain_that_was_not_merged_is_noticed():
    store, tree, node = branching_store(FULL)
    leaf = next(below for below in node.downwards() if below.boundary and not below.children)
    del store._memory.recency[leaf.boundary]
    store._memory.entries -= 1
    store._memory.nbytes -= leaf.boundary.nbytes
    leaf.boundary = None
    chain = Node(b"\x07" + bytes(7), leaf.end, [], "prefix-dynamic")
    leaf.adopt(chain)
    store._memory.recency[chain] = tree
    with pytest.raises(StoreIntegrityError):
        store.sanity_check()


def test_windows_that_are_not_those_of_the_end_are_noticed():
    store, _tree, node = branching_store(MIXED)
    boundary = next(below.boundary for below in node.downwards() if below.boundary)
    boundary.states = make_snapshot(list(range(50)), MIXED).layers[::2]
    with pytest.raises(StoreIntegrityError):
        store.sanity_check()


def test_a_server_that_is_not_the_lowest_is_noticed():
    store, _tree, node = branching_store(MIXED)
    node.server = max((below.boundary for below in node.downwards() if below.boundary), key=lambda item: item.floor)
    with pytest.raises(StoreIntegrityError):
        store.sanity_check()


def test_states_that_share_a_storage_are_noticed():
    store, _tree, node = branching_store(MIXED)
    boundary = next(below.boundary for below in node.downwards() if below.boundary)
    part = boundary.states[0].segments[0]
    object.__setattr__(boundary.states[0], "segments", (KeyValues(part.keys, part.keys),))
    with pytest.raises(StoreIntegrityError):
        store.sanity_check()
