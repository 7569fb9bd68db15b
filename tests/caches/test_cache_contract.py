"""What every prefix cache keeps of Transformers' contract, beside snapshot, fork and restore."""

import copy
import itertools

import pytest
import torch
from cache_oracles import (
    LENGTH,
    STRATEGIES,
    assert_exact,
    assert_unchanged,
    cached,
    contents,
    filled,
    new_cache,
    random_ids,
    uncached,
)
from transformers import AutoConfig, BartConfig, DynamicCache, StaticCache, T5Config
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.exceptions import UnsupportedLayerError, UnsupportedModelError
from hf_prefix_cache.layers import DYNAMIC_KINDS
from tiny_models import TINY_MODELS


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=["llama", "gemma3_text", "llama4"])
def model(request):
    return TINY_MODELS[request.param]()


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


def test_caches_and_layers_are_those_of_transformers_by_type():
    model = TINY_MODELS["gemma3_text"]()
    dynamic, static = (new_cache(strategy, model) for strategy in STRATEGIES)
    assert isinstance(dynamic, DynamicCache)
    assert isinstance(static, StaticCache)
    assert isinstance(dynamic.layers[0], DynamicSlidingWindowLayer)
    assert isinstance(dynamic.layers[1], DynamicLayer)
    assert isinstance(static.layers[0], StaticSlidingWindowLayer)
    assert isinstance(static.layers[1], StaticLayer)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_lengths_maxima_and_mask_sizes_are_those_of_transformers_caches(name):
    model = TINY_MODELS[name]()
    text = random_ids(1, LENGTH)
    pairs = (
        (new_cache("prefix-dynamic", model), DynamicCache(config=model.config)),
        (new_cache("prefix-static", model), StaticCache(config=model.config, max_cache_len=32)),
    )
    for ours, theirs in pairs:
        for start, stop in itertools.pairwise((0, 1, 6, 7, 8, 9, 10, 19, 20)):
            for cache in (ours, theirs):
                position_ids = torch.arange(start, stop)[None]
                mask = torch.zeros(1, 32, dtype=torch.int64)  # as long as static keys, which Bloom before 5.24 needs
                mask[:, :stop] = 1
                model(
                    input_ids=text[:, start:stop],
                    position_ids=position_ids,
                    attention_mask=mask if isinstance(cache, StaticCache) else None,
                    **cache_argument(cache),
                )
            for layer in range(len(ours.layers)):
                assert int(ours.get_seq_length(layer)) == int(theirs.get_seq_length(layer)) == stop
                assert ours.get_max_length(layer) == theirs.get_max_length(layer)
                for query in (1, 2, 7, 8, 9):
                    assert ours.get_mask_sizes(query, layer) == theirs.get_mask_sizes(query, layer)
        assert ours.get_max_length() == theirs.get_max_length()
        assert ours.is_sliding == theirs.is_sliding


def test_a_deepcopy_is_a_fork(strategy, model):
    text = random_ids(1, LENGTH)
    cache = filled(strategy, model, text[:, :13])
    copied = copy.deepcopy(cache)
    before = contents(copied)
    cached(model, random_ids(1, 3), cache)
    assert_unchanged(copied, before)
    assert_exact(cached(model, text[:, 13:], copied), uncached(model, text)[:, 13:])


def test_forwards_without_use_cache_change_neither_snapshots_nor_forked_parents(strategy, model):
    text = random_ids(1, LENGTH)
    cache = filled(strategy, model, text[:, :13])
    snapshot = cache.snapshot()
    before = contents(cache), contents(snapshot)
    for _ in range(2):
        logits = cached(model, text[:, 13:], cache.fork(), use_cache=False)
        assert_exact(logits, uncached(model, text)[:, 13:])
    assert_unchanged(cache, before[0])
    assert_unchanged(snapshot, before[1])


def test_after_reset_the_length_is_0_and_the_next_use_is_exact(strategy, model):
    cache = filled(strategy, model, random_ids(1, 19))
    cache.reset()
    assert cache.seq_length == int(cache.get_seq_length()) == 0
    assert cache.rows is None
    text = random_ids(2 if strategy == "prefix-dynamic" else 1, LENGTH)
    assert_exact(cached(model, text[:, :11], cache), uncached(model, text[:, :11]))
    assert_exact(cached(model, text[:, 11:], cache), uncached(model, text)[:, 11:])


def test_static_buffers_can_be_made_early(model):
    text = random_ids(1, LENGTH)
    cache = new_cache("prefix-static", model, max_batch_size=3)
    heads = model.config.num_key_value_heads
    cache.early_initialization(1, heads, model.config.head_dim, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.seq_length == 0
    places = [layer.keys.data_ptr() for layer in cache.layers]
    assert_exact(cached(model, text[:, :13], cache), uncached(model, text[:, :13]))
    cache.batch_repeat_interleave(3)
    assert_exact(cached(model, text[:, 13:].expand(3, -1), cache), uncached(model, text)[:, 13:].expand(3, -1, -1))
    assert [layer.keys.data_ptr() for layer in cache.layers] == places


def test_fewer_rows_than_the_static_cache_holds_use_its_first_rows(model):
    cache = filled("prefix-static", model, random_ids(3, 9))
    cache.reset()
    text = random_ids(2, LENGTH)
    assert_exact(cached(model, text[:, :13], cache), uncached(model, text[:, :13]))
    assert_exact(cached(model, text[:, 13:], cache), uncached(model, text)[:, 13:])


def test_assisted_decoding_takes_back_several_tokens_beyond_the_window(model):
    text = random_ids(1, 40)
    cache = filled("prefix-dynamic", model, text[:, :17])
    cache.activate_past_recording()
    position = 17
    for kept in (1, 4, 2, 3, 1, 4):
        guess = text[:, position : position + 4].clone()
        guess[:, kept:] = random_ids(1, 4 - kept)
        logits = cached(model, guess, cache)
        assert_exact(logits, uncached(model, torch.cat([text[:, :position], guess], dim=1))[:, position:])
        cache.crop(kept - 4)
        position += kept
        assert cache.seq_length == position
        cache.crop(0)
    assert_exact(cached(model, text[:, position:], cache), uncached(model, text)[:, position:])


def test_recording_goes_along_with_forks_and_what_was_recorded_with_snapshots():
    model = TINY_MODELS["mistral"]()
    text = random_ids(1, LENGTH)
    cache = filled("prefix-dynamic", model, text[:, :12])
    cache.activate_past_recording()
    cached(model, random_ids(1, 6), cache)
    for other in (cache.fork(), cache.snapshot().to_cache(), cache.snapshot().crop_to(12).to_cache()):
        other.crop_to(12)
        assert_exact(cached(model, text[:, 12:], other), uncached(model, text)[:, 12:])
    forked = cache.fork()
    cached(model, random_ids(1, 9), forked)
    assert forked.can_crop_to(12)


def test_what_transformers_asks_of_a_cache_is_answered_as_by_its_own():
    for name in ("llama", "gemma3_text", "mistral"):
        model = TINY_MODELS[name]()
        dynamic, static = (new_cache(strategy, model) for strategy in STRATEGIES)
        assert dynamic.is_croppable
        assert not dynamic.is_compileable
        assert static.is_compileable
        assert static.is_croppable == (name == "llama")
        assert new_cache("prefix-static", model, room=8).is_croppable
        assert len(dynamic) == len(static) == model.config.num_hidden_layers


@pytest.mark.parametrize("config", [T5Config(), BartConfig()], ids=["t5", "bart"])
def test_models_with_an_encoder_are_refused_by_name(config):
    with pytest.raises(UnsupportedModelError, match=type(config).__name__):
        hpc.PrefixDynamicCache(config=config)


def test_layers_of_another_kind_are_refused_by_name(monkeypatch):
    config = AutoConfig.for_model("deepseek_v4")
    with pytest.raises(
        UnsupportedLayerError, match=r"PrefixStaticCache .* use prefix-dynamic or prefix-offloaded for"
    ):
        hpc.PrefixStaticCache(config=config, max_cache_len=8)
    monkeypatch.delitem(DYNAMIC_KINDS, "heavily_compressed_attention")
    with pytest.raises(UnsupportedLayerError, match=r"PrefixDynamicCache .* use Transformers' own cache for"):
        hpc.PrefixDynamicCache(config=config)


def test_two_prefixes_run_through_one_compiled_decode_step():
    model = TINY_MODELS["gemma3_text"]()  # a window and full attention
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, backend=count, fullgraph=True)
    cache = new_cache("prefix-static", model)
    for round_ in range(3):
        text = random_ids(1, LENGTH)
        snapshot = filled("prefix-static", model, text[:, :7]).snapshot()
        cache.restore(snapshot)
        expected = uncached(model, text)
        for position in range(7, 14):
            logits = step(input_ids=text[:, position : position + 1], **cache_argument(cache)).logits
            assert_exact(logits, expected[:, position : position + 1])
        assert cache.seq_length == 14
        cache.crop(-1)
        assert_exact(cached(model, text[:, 13:], cache), expected[:, 13:])
        if not round_:
            compiled = len(graphs)
    assert len(graphs) == compiled <= 2  # windows take a second one once they are full
