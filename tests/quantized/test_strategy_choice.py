"""The choice of a strategy knows all four, quantizes only under a budget, and says what it gave up."""

import pytest
import torch
from transformers import PreTrainedModel

import hf_prefix_cache as hpc
from hf_prefix_cache.strategy import _BITS, predicted_bytes
from tiny_models import TINY_MODELS

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")


def held(model, strategy, length, **options):
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(1, 99, (2, length)), **hpc.compat.cache_argument(cache))
    return cache.snapshot().to_cache(strategy, batch_size=2, **options).snapshot().compact().nbytes


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("length", [30, 68 + 128])
def test_predicted_bytes_are_those_that_caches_hold(name, length):
    model = TINY_MODELS[name]()
    cpu = torch.device("cpu")
    found = predicted_bytes(model.config, tokens=length, batch_size=2, dtype=torch.float32, device=cpu)
    for strategy in ("prefix-dynamic", "prefix-offloaded", "prefix-quantized"):
        assert found[strategy] == held(model, strategy, length)
    assert found["prefix-static"] == found["prefix-dynamic"]
    assert hpc.choose_strategy(model, tokens=length, batch_size=2).predictions == found


def test_bits_are_those_of_the_backend():
    model = TINY_MODELS["llama"]()
    for nbits, bits in _BITS.items():
        cache = hpc.PrefixQuantizedCache(config=model.config, nbits=nbits)
        with torch.no_grad():
            model(torch.randint(1, 99, (1, 200)), **hpc.compat.cache_argument(cache))
        assert cache.report().bits_per_value == bits


def test_a_budget_forces_few_bits_and_the_choice_says_so():
    model = TINY_MODELS["llama"]()
    needed = hpc.choose_strategy(model, tokens=250).predicted_bytes
    exact = hpc.choose_strategy(model, tokens=250, memory_budget=needed)
    assert exact.strategy == "prefix-dynamic"
    chosen = [hpc.choose_strategy(model, tokens=250, memory_budget=int(needed * part)) for part in (0.5, 0.4)]
    assert [choice.options for choice in chosen] == [{"nbits": 8}, {"nbits": 4}]
    for choice, nbits in zip(chosen, (8, 4), strict=True):
        assert choice.strategy == "prefix-quantized"
        assert f"quantized to {nbits} bits" in str(choice)
        assert choice.predicted_bytes <= needed * 0.5
        prompt = torch.randint(1, 99, (1, 240))
        output = model.generate(
            prompt,
            max_new_tokens=2,
            do_sample=False,
            cache_implementation=choice.strategy,
            cache_config=dict(choice.options),
        )
        assert output.shape[1] == 242


def test_without_a_budget_nothing_is_quantized_unasked(monkeypatch):
    model = TINY_MODELS["llama"]()
    needed = hpc.choose_strategy(model, tokens=250).predicted_bytes
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: needed // 2)
    with pytest.raises(hpc.CacheCapacityError, match=r"in 8 bits or .* name prefix-quantized, which is not exact"):
        hpc.choose_strategy(model, tokens=250)
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: needed // 20)
    with pytest.raises(hpc.CacheCapacityError, match=r"pass fewer rows or tokens$"):
        hpc.choose_strategy(model, tokens=250)
    with pytest.raises(hpc.CacheCapacityError):
        hpc.choose_strategy(model, tokens=250, memory_budget=needed // 20)


def test_host_memory_is_chosen_where_the_device_is_short_of_its_own(monkeypatch):
    config = TINY_MODELS["llama"]().config
    config.num_hidden_layers = 6
    model = TINY_MODELS["llama"]()
    model.config = config
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    needed = predicted_bytes(config, tokens=250, batch_size=1, dtype=torch.float32, device=torch.device("cuda"))
    free = {"cuda": needed["prefix-offloaded"], "cpu": needed["prefix-dynamic"]}
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: free[device.type])
    choice = hpc.choose_strategy(model, tokens=250)
    assert choice.strategy == "prefix-offloaded"
    assert "only two layers at a time" in str(choice)


@pytest.mark.parametrize("budget", [0, -1])
def test_budgets_below_one_byte_are_refused(budget):
    with pytest.raises(hpc.InputMismatchError, match="memory_budget is"):
        hpc.choose_strategy(TINY_MODELS["llama"](), memory_budget=budget)
