"""Latent attention (DeepSeek-V2 and V3): a layer holds latents and rotary keys, of one head and of different sizes."""

import pytest
import torch
from quantized_oracles import FORMATS, name_of, new_cache, run
from transformers import DeepseekV2Config, DeepseekV3Config

import hf_prefix_cache as hpc
from tiny_models import DECODER, build

LATENT, ROTARY = 16, 4
SIZES = {
    **{name: value for name, value in DECODER.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS = {"deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=MODELS)
def model(request):
    return build(MODELS[request.param](**SIZES))


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_latents_are_quantized_and_every_operation_continues_alike(model, form):
    text, more = ids(1, 120), ids(3, 40)
    cache = new_cache(model, residual_length=8, **form)
    torch.testing.assert_close(run(model, text, cache), model(input_ids=text).logits, atol=1e-4, rtol=0)
    layer = cache.layers[1]
    assert (layer.keys.shape, layer.values.shape) == ((1, 1, 120, LATENT), (1, 1, 120, ROTARY))
    assert layer.state().runs
    snapshot = cache.snapshot()
    cache.crop_to(77)
    expected = [run(model, row[None], cache.fork()) for row in more]
    torch.testing.assert_close(run(model, more, cache.fork(3)), torch.cat(expected), atol=1e-4, rtol=0)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    torch.testing.assert_close(run(model, more, cache), torch.cat(expected), atol=1e-4, rtol=0)
    assert torch.equal(run(model, more[:1], snapshot.crop_to(77).to_cache()), expected[0])


def test_8_bits_stay_close_to_the_exact_model(model):
    text = ids(1, 150)
    cache = new_cache(model, nbits=8, residual_length=8)
    run(model, text[:, :120], cache)
    expected = model(input_ids=text).logits[:, 120:].log_softmax(-1)
    difference = run(model, text[:, 120:], cache).log_softmax(-1) - expected
    assert 0 < float((difference**2).mean().sqrt()) < 0.1


def test_predicted_bytes_are_those_that_caches_hold(model):
    cache = hpc.PrefixDynamicCache(config=model.config)
    run(model, ids(1, 196), cache)
    found = hpc.choose_strategy(model, tokens=196).predictions
    snapshot = cache.snapshot()
    assert found["prefix-dynamic"] == snapshot.compact().nbytes
    # Latents have more values than rotary keys, and scales of their own: nearly what is predicted for keys and values.
    quantized = snapshot.to_cache("prefix-quantized").snapshot().compact().nbytes
    assert abs(found["prefix-quantized"] / quantized - 1) < 0.02
