"""What layers keep of a token, told from the configuration: as much as the layers of a filled cache hold."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.key_value_sizes import key_value_widths
from zoo.build import build_architecture

NAMES = ("llama", "falcon", "gemma3n_text", "gemma4_text", "deepseek_v3", "qwen3_next", "lfm2")


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_widths_are_those_of_the_tensors(name):
    model = build_architecture(name)
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(torch.arange(5, 12)[None], **cache_argument(cache))
    held = [
        sum(tensor.shape[1] * tensor.shape[3] for tensor in layer.tensors())
        if layer.is_sliceable or layer.window
        else 0
        for layer in cache.layers
    ]
    assert key_value_widths(model.config) == held
    assert any(held)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text", "blt"])
def test_models_whose_sizes_differ_by_layer_or_have_no_name_are_scored_and_chosen_for(name):
    model = build_architecture(name)
    requests = [([5, 6, 7], [8, 9]), ([5, 6, 8], [9])]
    for score, (context, rest) in zip(hpc.loglikelihood(model, requests, progress=False), requests, strict=True):
        with torch.no_grad():
            logprobs = (
                model(torch.tensor([context + rest]), use_cache=False).logits[0].log_softmax(-1)[len(context) - 1 : -1]
            )
        expected = logprobs.gather(1, torch.tensor(rest)[:, None]).sum().item()
        assert score.logprob == pytest.approx(expected, abs=1e-4)
    if name == "blt":
        with pytest.raises(hpc.UnsupportedModelError):
            hpc.choose_strategy(model, tokens=64)
    else:
        assert hpc.choose_strategy(model, tokens=64).strategy == "prefix-dynamic"


@pytest.mark.parametrize("name", ["blt", "rwkv", "xlstm"])
def test_models_without_a_cache_keep_no_keys(name):
    model = build_architecture(name)
    assert not any(key_value_widths(model.config))
    assert hpc.plan([([5, 6, 7], [8])]).kv_bytes(model) == 0
