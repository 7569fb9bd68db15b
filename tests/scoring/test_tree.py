import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefix_cache.scoring.chunk_size import BatchLimits
from hf_prefix_cache.scoring.forked import stretches
from hf_prefix_cache.scoring.packed import chunk_bounds
from hf_prefix_cache.scoring.probes import Probes
from hf_prefix_cache.scoring.requests import pack_requests
from hf_prefix_cache.scoring.tree import build_tree, sort_rows

few_tokens = st.lists(st.integers(0, 2), max_size=7)
request_lists = st.lists(st.tuples(few_tokens.filter(bool), few_tokens), max_size=10)
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def fed(request: tuple[list[int], list[int]]) -> list[int]:
    context, continuation = request
    return [*context, *continuation][:-1] if continuation else []


@quick
@given(request_lists)
def test_the_tree_holds_every_distinct_prefix_once(requests: list) -> None:
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    prefixes = {tuple(fed(request)[:end]) for request in requests for end in range(1, len(fed(request)) + 1)}
    assert len(tree) == len(prefixes)
    paths = {tuple(tree.tokens[[*tree.ancestors_of(node), node]].tolist()) for node in range(len(tree))}
    assert paths == prefixes


@quick
@given(request_lists)
def test_nodes_of_a_row_read_its_tokens(requests: list) -> None:
    packed = pack_requests(requests)
    rows = sort_rows(packed)
    tree = build_tree(packed, rows)
    for request, row in zip(requests, rows.row_of_request, strict=True):
        length = len(fed(request))
        assert (row == -1) == (length == 0)
        nodes = tree.nodes_at(np.full(length, row), np.arange(length))
        assert tree.tokens[nodes].tolist() == fed(request)
        assert tree.depths[nodes].tolist() == list(range(length))


@quick
@given(request_lists)
def test_ends_tell_ancestors_from_others(requests: list) -> None:
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    for below in range(len(tree)):
        ancestors = {*tree.ancestors_of(below).tolist(), below}
        assert {above for above in range(len(tree)) if above <= below < tree.ends[above]} == ancestors


@quick
@given(request_lists, st.integers(1, 9), st.integers(1, 5))
def test_chunks_cover_the_tree_within_their_limits(requests: list, max_tokens: int, max_probes: int) -> None:
    packed = pack_requests(requests)
    rows = sort_rows(packed)
    tree = build_tree(packed, rows)
    probes = Probes.of(packed, rows, torch.float32)
    probed = np.unique(tree.nodes_at(probes.rows, probes.depths))
    bounds = list(chunk_bounds(tree, probed, BatchLimits(max_tokens, max_probes, max_tokens)))
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds)][: len(bounds)]
    assert (bounds[-1][1] if bounds else 0) == len(tree)
    for start, stop in bounds:
        assert 0 < stop - start <= max_tokens
        assert ((probed >= start) & (probed < stop)).sum() <= max_probes


def test_a_chunk_ends_where_the_next_one_needs_the_shortest_path() -> None:
    requests = [([token] * 13, [0]) for token in (1, 2, 3)]
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    assert list(chunk_bounds(tree, np.array([12, 25, 38]), BatchLimits(16, 99, 16))) == [(0, 13), (13, 26), (26, 39)]


def test_unrelated_rows_are_kept_apart_once_a_chunk_has_enough_tokens() -> None:
    requests = [([token] * 10, [0]) for token in range(6)]
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    probed = np.arange(9, 60, 10)
    assert list(chunk_bounds(tree, probed, BatchLimits(100, 99, 15))) == [(0, 20), (20, 40), (40, 60)]
    assert list(chunk_bounds(tree, probed, BatchLimits(100, 99, 100))) == [(0, 60)]


@quick
@given(request_lists)
def test_stretches_partition_the_tree_at_its_branches(requests: list) -> None:
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    found = stretches(tree)
    assert [node for stretch in found for node in range(stretch.start, stretch.stop)] == list(range(len(tree)))
    for stretch in found:
        above = tree.ancestors_of(stretch.start)
        assert (len(above) == 0) == (stretch.parent == -1)
        if len(above):
            assert above[-1] == found[stretch.parent].stop - 1
        for node in range(stretch.start + 1, stretch.stop):
            assert tree.ancestors_of(node)[-1] == node - 1
    parents = [stretch.parent for stretch in found]
    for place, stretch in enumerate(found):
        ends_a_row = any(
            row >= 0 and tree.nodes_at(np.array([row]), np.array([length - 1]))[0] == stretch.stop - 1
            for row, length in zip(sort_rows(packed).row_of_request, packed.fed_lengths.tolist(), strict=True)
            if length
        )
        assert ends_a_row or parents.count(place) > 1
