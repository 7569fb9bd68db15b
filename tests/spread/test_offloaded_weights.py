"""Models whose weights accelerate keeps in host memory or on disk: every strategy equals the uncached call."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from spread_models import CPU, SPREADS, in_host_memory, mapped, on_disk

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.fingerprint import fingerprint_of
from hf_prefix_cache.weights import input_device
from tiny_models import TINY_MODELS

pytestmark = pytest.mark.filterwarnings("ignore:.*non-writable:UserWarning")  # of accelerate, reading files

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
STRATEGIES = (
    *("prefix-dynamic", "prefix-static", "prefix-offloaded", "prefix-auto"),
    pytest.param("prefix-quantized", marks=needs_bitsandbytes),
)
SPREAD_MODELS = [("llama", "host"), ("llama", "disk"), ("gemma3_text", "mapped"), ("qwen3_next", "mapped")]


def options_of(strategy):
    return {"cache_config": {"nbits": 8}} if strategy == "prefix-quantized" else {}


@pytest.fixture(scope="module", params=SPREAD_MODELS, ids="-".join)
def model(request, tmp_path_factory):
    name, spread = request.param
    return SPREADS[spread](name, tmp_path_factory.mktemp(spread))


@pytest.fixture
def weights(model):
    """Everything on the meta device, where it has no values, but what the map leaves on the device."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    assert "meta" in kinds
    return kinds


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate_equals_the_uncached_call_and_reuses(model, strategy):
    hpc.store_for(model).clear()
    prompt = tokens(1, 40)
    batch = torch.cat([prompt.expand(2, -1), tokens(2, 5, seed=1)], dim=1)
    options = {"cache_implementation": strategy, **options_of(strategy)}
    expected = generated(model, prompt)
    for reused in (0, 39):
        assert torch.equal(generated(model, prompt, **options), expected)
        assert hpc.last_report(model).reused_tokens == reused
    assert torch.equal(generated(model, batch, **options), generated(model, batch))
    assert hpc.last_report(model).reused_tokens >= 39
    assert torch.equal(generated(model, batch, num_beams=2, **options), generated(model, batch, num_beams=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_behind_a_prefix_equals_the_uncached_forward(model, strategy):
    wrapped, text = hpc.PrefixCachedModel(model, strategy=strategy), tokens(2, 18, seed=2)
    text[1, :13] = text[0, :13]
    prefix = wrapped.prefill(text[0, :13])
    with torch.no_grad():
        logits = wrapped.forward(text[:, 13:], prefix=prefix).logits
        expected = model(text).logits[:, 13:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_scores_equal_those_of_uncached_rows(model):
    contexts = tokens(2, 20, seed=3)
    contexts[1, :15] = contexts[0, :15]
    requests = [(context.tolist(), continuation) for context in contexts for continuation in ([5, 6], [7])]
    scores = hpc.loglikelihood(model, requests, progress=False)
    for (context, continuation), score in zip(requests, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
        torch.testing.assert_close(score.logprob, float(expected), atol=1e-4, rtol=0)


def test_the_fingerprint_is_that_of_the_same_weights_at_hand_and_stays(tmp_path):
    expected = fingerprint_of(TINY_MODELS["llama"]())
    for make in (in_host_memory, on_disk):
        model = make("llama", tmp_path)
        assert fingerprint_of(model) == expected
        generated(model, tokens(1, 5))
        assert fingerprint_of(model) == expected
    model = mapped("llama", tmp_path)
    before = fingerprint_of(model)
    generated(model, tokens(1, 5))
    assert fingerprint_of(model) == before


def test_weights_that_change_in_host_memory_are_noticed(tmp_path):
    model = in_host_memory("llama", tmp_path)
    wrapped, prompt = hpc.PrefixCachedModel(model), tokens(1, 12)
    prefix = wrapped.prefill(prompt)
    generated(model, prompt, cache_implementation="prefix-dynamic")
    model.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"].mul_(1.5)
    with pytest.raises(hpc.FingerprintMismatchError), torch.no_grad():
        wrapped.forward(tokens(1, 2), prefix=prefix)
    output = generated(model, prompt, cache_implementation="prefix-dynamic")
    assert torch.equal(output, generated(model, prompt))
    assert hpc.last_report(model).reused_tokens == 0


def test_weights_that_change_on_disk_are_noticed(tmp_path):
    model = on_disk("llama", tmp_path)
    prompt = tokens(1, 12)
    generated(model, prompt, cache_implementation="prefix-dynamic")
    (file,) = (tmp_path / "weights").glob("*layers.1.mlp.up_proj.weight.dat")
    values = np.fromfile(file, dtype=np.float32)
    (values * 1.5).tofile(file)
    output = generated(model, prompt, cache_implementation="prefix-dynamic")
    assert torch.equal(output, generated(model, prompt))
    assert hpc.last_report(model).reused_tokens == 0


def test_weights_on_disk_are_read_for_the_fingerprint_once(tmp_path, monkeypatch):
    model = on_disk("llama", tmp_path)
    fingerprint_of(model)
    monkeypatch.setattr(hpc.fingerprint, "tensor_checksum", None)
    generated(model, tokens(1, 5))
    fingerprint_of(model)


@pytest.mark.parametrize("make", [in_host_memory, on_disk])
def test_a_saved_prefix_of_a_model_at_hand_continues_in_the_offloaded_one(make, tmp_path):
    prompt = tokens(1, 12)
    prefix = hpc.PrefixCachedModel(TINY_MODELS["llama"]()).prefill(prompt)
    prefix.save(tmp_path / "prefix.safetensors")
    model = make("llama", tmp_path)
    loaded = hpc.PrefixSnapshot.load(tmp_path / "prefix.safetensors", model=model)
    with torch.no_grad():
        logits = hpc.PrefixCachedModel(model).forward(tokens(1, 4, seed=1), prefix=loaded).logits
        expected = model(torch.cat([prompt, tokens(1, 4, seed=1)], dim=1)).logits[:, 12:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [in_host_memory, on_disk])
def test_inputs_go_where_the_weights_go(make, tmp_path):
    model = make("llama", tmp_path)
    assert model.device.type == "meta"
    assert input_device(model) == CPU
    choice = hpc.choose_strategy(model, tokens=100)
    assert choice.strategy == "prefix-dynamic"
    assert "free on cpu" in str(choice)
