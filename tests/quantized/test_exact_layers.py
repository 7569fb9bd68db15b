"""Layers that stay exact among quantized ones, and bits of values that differ from those of keys."""

import pytest
import torch
from quantized_oracles import new_cache, run

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import InputMismatchError
from tiny_models import TINY_MODELS

SHORT = {"residual_length": 8}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return TINY_MODELS["llama"]()


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def filled(cache, model, text):
    run(model, text, cache)
    return cache


@pytest.mark.parametrize(("named", "kept"), [([0], 0), ([-1], 1), ((1,), 1)])
def test_named_layers_hold_what_an_exact_cache_holds_and_others_are_quantized(model, named, kept):
    text = ids(1, 150)
    cache = filled(new_cache(model, exact_layers=named, **SHORT), model, text)
    exact = filled(hpc.PrefixDynamicCache(config=model.config), model, text)
    # The first layer's keys depend on ids alone, the second's on what the first one attended to: exact in one forward.
    for index, (now, was) in enumerate(zip(cache.layers, exact.layers, strict=True)):
        assert torch.equal(now.keys, was.keys) == (index == kept)
    error = cache.report().error
    assert error.keys[kept] == error.values[kept] == 0
    assert error.keys[1 - kept] > 0
    assert f"exact layers {kept}" in cache.report().scheme


def test_snapshots_forks_crops_and_rows_keep_their_exact_layers(model):
    text, more = ids(1, 150), ids(2, 40)
    cache = filled(new_cache(model, exact_layers=[0], **SHORT), model, text)
    snapshot = cache.snapshot()
    before = cache.layers[0].keys
    expected = run(model, more, cache.fork(2))
    for other in (snapshot.to_cache(batch_size=2), cache.fork(2)):
        assert torch.equal(run(model, more, other), expected)
    cache.crop_to(77)
    shorter = snapshot.crop_to(77).to_cache()
    assert torch.equal(run(model, more[:1], cache), run(model, more[:1], shorter))
    cache.restore(snapshot)
    assert torch.equal(cache.layers[0].keys, before)


def test_prefixes_with_other_exact_layers_are_refused_and_nothing_changes(model):
    snapshot = filled(new_cache(model, exact_layers=[0], **SHORT), model, ids(1, 150)).snapshot()
    other = filled(new_cache(model, exact_layers=[1], **SHORT), model, ids(1, 5))
    with pytest.raises(InputMismatchError, match=r"exact layers 0, but the cache quantizes as .* exact layers 1"):
        other.restore(snapshot)
    assert other.seq_length == 5


def test_generate_takes_them_and_keeps_their_prefixes_apart(model):
    prompt = ids(1, 120)

    def generate(**options):
        config = {**SHORT, **options}
        settings = {"max_new_tokens": 4, "do_sample": False, "cache_config": config}
        return model.generate(prompt, cache_implementation="prefix-quantized", **settings)

    first = generate(exact_layers=[0], nbits=8, value_nbits=4)
    assert torch.equal(first, generate(exact_layers=[0], nbits=8, value_nbits=4))
    assert hpc.last_report(model).computed_tokens == 1
    generate(exact_layers=[1], nbits=8, value_nbits=4)
    assert hpc.last_report(model).reused_tokens == 0
    generate(exact_layers=[0], nbits=8)
    assert hpc.last_report(model).reused_tokens == 0


def test_bits_of_keys_and_values_add_up(model):
    text = ids(1, 4 + 224)
    options = {"residual_length": 0}
    both = [filled(new_cache(model, nbits=8, value_nbits=bits, **options), model, text) for bits in (None, 8, 4)]
    keys, values = 8 + 16 / 64, 4 + 16 / 64
    assert [cache.report().bits_per_value for cache in both] == [keys, keys, (keys + values) / 2]
    assert both[0].report().scheme == both[1].report().scheme != both[2].report().scheme
    assert both[0].report().error.keys == both[2].report().error.keys
    assert both[0].report().error.values[0] < 0.2 * both[2].report().error.values[0]
