"""Layers on devices of their own: the meta device stands for a second one, which has shapes but no values."""

import pytest
import torch
from transformers import PreTrainedModel

import hf_prefix_cache as hpc
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

DEVICES = ("cpu", "meta")  # of the first layer, and of the second


def new_cache(strategy, config, rows=1):
    if strategy == "prefix-static":
        return hpc.PrefixStaticCache(config=config, max_cache_len=16, max_batch_size=rows)
    return hpc.PrefixDynamicCache(config=config)


def feed(cache, count, rows=1):
    for index, device in enumerate(DEVICES):
        states = torch.randn(rows, 2, count, 8, device=device)
        keys, values = cache.update(states, states, index)
        assert keys.device.type == values.device.type == device


def devices_of(cache):
    return tuple({tensor.device.type for tensor in layer.tensors()} for layer in cache.layers)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static"])
def test_46748_33147_every_layer_stays_on_its_own_device(strategy, name):
    config = TINY_MODELS[name]().config
    cache = new_cache(strategy, config, rows=4)
    feed(cache, 5)
    apart = ({"cpu"}, {"meta"})
    snapshot = cache.snapshot()
    assert tuple({tensor.device.type for tensor in layer.tensors()} for layer in snapshot.layers) == apart
    fork = cache.fork()
    feed(fork, 1)
    fork.crop(-1)
    fork.batch_repeat_interleave(4)
    fork.reorder_cache(torch.tensor([3, 0, 1, 1]))
    fork.batch_select_indices(torch.tensor([0, 2]))
    feed(fork, 2, rows=2)
    cache.restore(snapshot)
    feed(cache, 3)
    other = "prefix-static" if strategy == "prefix-dynamic" else "prefix-dynamic"
    crossed = snapshot.to_cache(other, batch_size=2, **({"max_cache_len": 16} if other == "prefix-static" else {}))
    feed(crossed, 1, rows=2)
    for holder in (cache, fork, crossed):
        assert devices_of(holder) == apart
    cache.reset()
    feed(cache, 2)
    assert devices_of(cache) == apart


def test_46748_running_states_stay_beside_the_attention_of_their_layer():
    config = RECURRENT_MODELS["falcon_h1"]().config
    cache = hpc.PrefixDynamicCache(config=config)
    for index, device in enumerate(DEVICES):
        cache.update_conv_state(torch.randn(1, 80, 6, device=device), index, conv_kernel_size=4)
        cache.update_recurrent_state(torch.randn(1, 8, 8, 8, device=device), index)
    feed(cache, 6)
    fork = cache.fork(batch_size=2)
    fork.reorder_cache(torch.tensor([1, 0]))
    assert devices_of(fork) == devices_of(cache.snapshot().to_cache()) == ({"cpu"}, {"meta"})


def test_a_snapshot_from_a_file_goes_to_the_device_of_each_layer(tmp_path):
    model = TINY_MODELS["llama"]()
    prefix = hpc.PrefixCachedModel(model).prefill(torch.randint(3, 99, (1, 9)))
    prefix.save(tmp_path / "prefix.safetensors")
    model.model.layers[1].to("meta")
    loaded = hpc.PrefixSnapshot.load(tmp_path / "prefix.safetensors", model=model, unverified=True)
    found = [{tensor.device.type for tensor in layer.tensors()} for layer in loaded.layers]
    assert found == [{"cpu"}, {"meta"}]


def test_33147_32624_37974_static_shapes_are_never_chosen_where_a_model_is_spread(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: 10**9)
    model = TINY_MODELS["llama"]()
    assert hpc.choose_strategy(model, tokens=100).strategy == "prefix-static"
    for places in ({"model": 0, "lm_head": 1}, {"model": 0, "lm_head": "cpu"}, {"model": 0, "lm_head": "disk"}):
        model.hf_device_map = places
        choice = hpc.choose_strategy(model, tokens=100)
        assert choice.strategy == "prefix-dynamic"
        assert "spread over devices" in str(choice)
