"""Sparse attention with an index on buffers of a fixed size."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.layers.static_indexed import PrefixStaticIndexedLayer
from hf_prefix_cache.oracle import Oracle, continued
from zoo.build import build_architecture

PREFIX, FIRST, SECOND = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), (20, 21, 22), (30, 31, 32)


@pytest.fixture(scope="module")
def model():
    return build_architecture("deepseek_v32")  # its index picks 8 tokens: the prefix has more


def static(model, **options):
    return hpc.PrefixStaticCache(config=model.config, max_cache_len=24, **options)


def addresses(cache):
    return [tensor.data_ptr() for tensor in cache.tensors]


def assert_continues(model, cache, prefix, suffixes):
    oracle = Oracle(model)
    with torch.no_grad():
        for row, suffix in zip(continued(model, cache, suffixes), suffixes, strict=True):
            torch.testing.assert_close(row, oracle.after(prefix, suffix), atol=1e-4, rtol=0)


def filled(model, cache, prefix=PREFIX, rows=1):
    with torch.no_grad():
        continued(model, cache, [prefix] * rows)
    return cache


def test_going_back_to_a_snapshot_keeps_every_buffer_where_it_is(model):
    cache = filled(model, static(model))
    snapshot, before = cache.snapshot(), addresses(cache)
    assert_continues(model, cache, PREFIX, [FIRST])
    cache.restore(snapshot)
    assert addresses(cache) == before
    assert_continues(model, cache, PREFIX, [SECOND])


def test_prefixes_go_from_growing_to_fixed_caches_and_back(model):
    grown = filled(model, hpc.PrefixDynamicCache(config=model.config)).snapshot()
    fixed = grown.to_cache("prefix-static", 2, max_cache_len=24)
    assert_continues(model, fixed, PREFIX, [FIRST, SECOND])
    back = filled(model, static(model)).snapshot().to_cache("prefix-dynamic", 2)
    assert_continues(model, back, PREFIX, [FIRST, SECOND])


def test_batches_smaller_than_the_buffers_use_their_first_rows(model):
    cache = filled(model, static(model, max_batch_size=3))
    cache.batch_repeat_interleave(3)
    assert_continues(model, cache, PREFIX, [FIRST, SECOND, FIRST[::-1]])
    cache.batch_select_indices(torch.tensor([1]))
    assert_continues(model, cache, PREFIX + SECOND, [FIRST])
    cache.crop_to(len(PREFIX))
    assert_continues(model, cache, PREFIX, [SECOND])


def test_what_does_not_fit_is_refused_and_changes_nothing(model):
    cache = filled(model, static(model))
    with pytest.raises(hpc.CacheCapacityError, match="max_cache_len of at least 25"):
        continued(model, cache, [tuple(range(3, 17))])
    with pytest.raises(hpc.BatchSizeError, match="2 rows"):
        continued(model, cache, [FIRST, SECOND])
    assert_continues(model, cache, PREFIX, [FIRST])


def test_an_index_that_is_filled_before_the_keys_is_held_to_the_same_rules():
    layer = PrefixStaticIndexedLayer(4)
    keys = torch.randn(2, 3, 5)
    assert torch.equal(layer.update_indexer(keys)[:, :3], keys)
    with pytest.raises(hpc.CacheCapacityError, match="max_cache_len of at least 5"):
        layer.update_indexer(keys[:, :2])
    assert layer.indexed() == 3


def test_gradients_flow_through_the_index_and_end_with_a_reset(model):
    cache = static(model)
    continued(model, cache, [PREFIX])[0, -1].sum().backward()
    model.zero_grad()
    cache.reset()
    assert not any(tensor.requires_grad for tensor in cache.tensors)
    assert_continues(model, filled(model, cache), PREFIX, [FIRST])


def test_generate_reuses_a_prefix(model):
    prompt = tokens(1, 12)
    expected = generated(model, prompt)
    for _ in range(2):
        assert torch.equal(generated(model, prompt, cache_implementation="prefix-static"), expected)
    assert hpc.last_report(model).reused_tokens == 11


def test_rejected_drafts_are_taken_back(model):
    prompt = torch.cat([tokens(1, 6)] * 2, dim=1)
    expected = generated(model, prompt, max_new_tokens=9)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 9}
    assert torch.equal(generated(model, prompt, cache_implementation="prefix-static", **options), expected)
