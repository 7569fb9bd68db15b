"""What users reported of quantized and offloaded caches elsewhere, and what holds here.

The numbers are those of huggingface/transformers.
"""

import copy
import sys
import types

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.exceptions import MissingPackageError
from hf_prefix_cache.layers.offloaded import OffloadedState
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

BACKENDS = [{"backend": "bitsandbytes", "nbits": 8}, {"backend": "hqq", "nbits": 4}]
LENGTH = 150


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=BACKENDS, ids=lambda options: options["backend"])
def options(request):
    pytest.importorskip(request.param["backend"])
    return {**request.param, "residual_length": 8}


@pytest.fixture
def model():
    return TINY_MODELS["llama"]()


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def filled(model, text, **options):
    cache = hpc.PrefixQuantizedCache(config=model.config, **options)
    model(input_ids=text, **cache_argument(cache))
    return cache


def held(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def test_45510_crop_repeat_select_and_reorder_act_on_all_that_a_quantized_cache_holds(model, options):
    cache = filled(model, ids(3, LENGTH), **options)
    assert all(layer.state().runs for layer in cache.layers)
    before = held(cache)
    cache.crop(-1)
    cache.crop_to(100)  # inside what is quantized
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3, 5]))
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    rows = torch.tensor([2, 2, 0, 1])  # repeated 0 0 1 1 2 2, selected 0 1 1 2, reordered
    for layer, sides in zip(cache.layers, before, strict=True):
        for now, was in zip((layer.keys, layer.values), sides, strict=True):
            assert torch.equal(now, was[rows, :, :100])
    assert cache.seq_length == 100


def test_48700_settings_of_the_user_are_as_they_were_after_a_call(model, options):
    settings = {**options, "exact_layers": [0]}
    before = copy.deepcopy(settings)
    config = copy.deepcopy(model.generation_config)
    config.cache_config, config.cache_implementation, config.max_new_tokens = settings, "prefix-quantized", 3
    for _ in range(2):
        model.generate(ids(1, LENGTH), generation_config=config, do_sample=False)
    assert settings == before
    assert config.cache_config == before
    assert model.generation_config.cache_config is None


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "gemma3_text"])
def test_46748_offloading_leaves_running_states_and_windows_where_they_compute(name):
    model = {**RECURRENT_MODELS, **TINY_MODELS}[name]()
    cache = hpc.PrefixOffloadedCache(config=model.config)
    text = ids(1, 30)
    model(input_ids=text[:, :20], **cache_argument(cache))
    kinds = set()
    for layer in cache.layers:
        state = layer.state()
        attention = getattr(state, "attention", state)
        kinds.add(isinstance(attention, OffloadedState))
        if isinstance(attention, OffloadedState):
            assert attention.home == model.device
    assert True in kinds
    found = model(input_ids=text[:, 20:21], **cache_argument(cache)).logits
    torch.testing.assert_close(found, model(input_ids=text[:, :21]).logits[:, 20:], atol=1e-4, rtol=0)


def test_34848_40099_a_release_of_a_backend_that_works_otherwise_is_named_when_the_cache_is_made(model, monkeypatch):
    hqq = pytest.importorskip("hqq.core.quantize")

    class Moved(hqq.Quantizer):
        unpack = None

    monkeypatch.setitem(sys.modules, "hqq.core.quantize", types.SimpleNamespace(Quantizer=Moved))
    monkeypatch.setattr(sys.modules["hqq"], "__version__", "99.0")
    with pytest.raises(MissingPackageError, match=r"hqq 99\.0 does not decode what this version"):
        hpc.PrefixQuantizedCache(config=model.config, backend="hqq", nbits=4)
    # The other backend is not concerned.
    pytest.importorskip("bitsandbytes")
    assert filled(model, ids(1, LENGTH)).is_lossy
