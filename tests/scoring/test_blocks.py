import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_prefix_cache.scoring import blocks, loglikelihood
from hf_prefix_cache.scoring.blocks import attention_blocks
from hf_prefix_cache.scoring.masks import packed_attention
from hf_prefix_cache.scoring.requests import pack_requests
from hf_prefix_cache.scoring.tree import build_tree, sort_rows
from scoring.models import PACKED
from scoring.oracle import assert_scores_match, plain_scores

few_tokens = st.lists(st.integers(0, 2), max_size=7)
request_lists = st.lists(st.tuples(few_tokens.filter(bool), few_tokens.filter(bool)), min_size=1, max_size=10)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_LEAST", 2)
    monkeypatch.setattr(blocks, "_MOST", 5)
    monkeypatch.setattr(blocks, "_WORTHWHILE", 1.0)
    monkeypatch.setattr(blocks, "_MERGE", 1)
    monkeypatch.setattr(blocks, "_CALL", 1)
    monkeypatch.setattr(blocks, "_KEYS_AT_ONCE", 3)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(request_lists, st.integers(0, 99), st.integers(1, 20))
def test_blocks_hold_every_key_their_queries_may_see(requests: list, begin: int, size: int) -> None:
    packed = pack_requests(requests)
    tree = build_tree(packed, sort_rows(packed))
    start = begin % len(tree)
    stop = min(start + size, len(tree))
    path = tree.ancestors_of(start)
    nodes = np.concatenate([path, np.arange(start, stop)])
    cut = attention_blocks(tree, path, start, stop)
    assert [query for block in cut for query in range(block.start, block.stop)] == list(range(stop - start))
    for block in cut:
        held = nodes[np.concatenate([np.arange(stretch.start, stretch.stop) for stretch in block.keys])]
        for query in range(block.start, block.stop):
            node = start + query
            assert {node, *tree.ancestors_of(node).tolist()} <= set(held.tolist())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama4", "gpt2", "cohere2"])
def test_attention_in_blocks_gives_plain_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = blocks._groups
    monkeypatch.setattr(blocks, "_groups", lambda *a: used.extend(original(*a)) or original(*a))
    root = [5, 9, 12, 7, 30, 41, 5, 9, 2, 77, 15, 3, 8]
    requests = [([*root, a, a + 1, *root[:b]], [b + 20, a, 4]) for a in (20, 31, 40) for b in (1, 4, 9)]
    model = PACKED[name]()
    for max_batch_tokens in (16, 512):
        scores = loglikelihood(model, requests, max_batch_tokens=max_batch_tokens, progress=False, self_check=False)
        assert_scores_match(scores, plain_scores(model, requests))
    assert any(group.common for group in used)
    assert name != "llama" or any(len(group.parts) > 1 for group in used)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_blocks_are_gathered_into_the_groups_that_save_most(sizes: list[tuple[int, int]]) -> None:
    seen, queries = [size[0] for size in sizes], [size[1] for size in sizes]

    def saved(common: int, start: int, stop: int) -> int:
        assert common in (0, min(seen[start:stop]))
        return sum(queries[start:stop]) * (common - blocks._MERGE) - blocks._CALL if common else 0

    def best(stop: int) -> int:
        return max(
            (best(start) + max(0, saved(min(seen[start:stop]), start, stop)) for start in range(stop)), default=0
        )

    found = blocks._gathered(seen, queries)
    assert [place for _, start, stop in found for place in range(start, stop)] == list(range(len(sizes)))
    assert sum(saved(*group) for group in found) == best(len(sizes))


def test_blocks_are_left_out_where_they_save_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_WORTHWHILE", 0.9)
    packed = pack_requests([(list(range(20)), [1])])
    tree = build_tree(packed, sort_rows(packed))
    assert attention_blocks(tree, np.zeros(0, dtype=np.int64), 0, 4) == ()


def test_the_attention_interface_is_put_back() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with packed_attention("sdpa"):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_blocks_are_as_near_to_exact_attention_as_the_kernel_is() -> None:
    torch.manual_seed(0)
    packed = pack_requests([([1, 2, 3, a, b], [4, 5]) for a in range(3) for b in range(3)])
    tree = build_tree(packed, sort_rows(packed))
    places = torch.arange(len(tree))
    ends = torch.from_numpy(tree.ends)
    mask = ((places[None] <= places[:, None]) & (places[:, None] < ends[None]))[None, None]
    query, key, value = (
        torch.randn(1, 4, len(tree), 8),
        torch.randn(1, 2, len(tree), 8),
        torch.randn(1, 2, len(tree), 6),
    )
    cut = attention_blocks(tree, np.zeros(0, dtype=np.int64), 0, len(tree))
    found, _ = blocks.attend_in_blocks(None, cut, {})(None, query, key, value, mask, scaling=0.3)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-5, rtol=0)
