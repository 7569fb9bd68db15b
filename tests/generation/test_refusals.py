"""Models that the prefix strategies do not serve are refused by name, and nothing of them is changed."""

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    XLNetConfig,
)

import hf_prefix_cache as hpc
from generation.oracles import STATIC_BLOOM, STRATEGIES, generated, tokens
from hf_prefix_cache.layers import DYNAMIC_KINDS
from tiny_models import DECODER, build


def t5():
    config = T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def bart():
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    return AutoModelForSeq2SeqLM.from_config(BartConfig(vocab_size=99, d_model=16, **sizes)).eval()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "prefix-auto"])
@pytest.mark.parametrize("make", [t5, bart])
def test_models_with_an_encoder_are_refused_by_name(make, strategy):
    model, prompt = make(), tokens(1, 6)
    plain = generated(model, prompt)
    with pytest.raises(
        hpc.UnsupportedModelError, match=f"{type(model).__name__} is an encoder-decoder.*leave cache_imp"
    ):
        generated(model, prompt, cache_implementation=strategy)
    assert torch.equal(generated(model, prompt), plain)


class OwnPrefill(LlamaForCausalLM):
    def _prefill(self, *args, **kwargs):
        return super()._prefill(*args, **kwargs)


class OwnCachePreparation(LlamaForCausalLM):
    def _prepare_cache_for_generation(self, *args, **kwargs):
        return super()._prepare_cache_for_generation(*args, **kwargs)


@pytest.mark.parametrize("kind", [OwnPrefill, OwnCachePreparation])
def test_models_with_a_prefill_or_cache_of_their_own_are_refused_by_name(kind):
    model = kind(LlamaConfig(**DECODER)).eval()
    plain = generated(model, tokens(1, 6))
    with pytest.raises(hpc.UnsupportedModelError, match=f"{kind.__name__} has its own _pre"):
        generated(model, tokens(1, 6), cache_implementation="prefix-dynamic")
    assert torch.equal(generated(model, tokens(1, 6)), plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_no_cache_holds_are_refused_by_their_kind(strategy, monkeypatch):
    sharing = {
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 2,
    }
    extra = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "laurel_rank": 4}
    altup = {"altup_num_inputs": 2, "altup_active_idx": 0}
    model, prompt = build(Gemma3nTextConfig(**DECODER, **sharing, **extra, **altup)), tokens(1, 6)
    plain = generated(model, prompt)
    assert torch.equal(generated(model, prompt, cache_implementation=strategy), plain)
    monkeypatch.delitem(DYNAMIC_KINDS, "dummy")
    with pytest.raises(hpc.UnsupportedLayerError, match=r"layer 1 of Gemma3nTextConfig is of the kind 'dummy'"):
        generated(model, prompt, cache_implementation=strategy)
    assert torch.equal(generated(model, prompt), plain)


def test_models_that_keep_their_state_elsewhere_are_refused_by_name():
    model = build(XLNetConfig(vocab_size=99, d_model=16, n_layer=1, n_head=2, d_inner=16))
    with pytest.raises(hpc.PrefixCacheError, match="XLNet"):
        generated(model, tokens(1, 6), cache_implementation="prefix-dynamic")


@pytest.mark.skipif(STATIC_BLOOM, reason="this release of Transformers runs Bloom on static caches")
def test_bloom_is_refused_by_name_where_it_cannot_run_on_static_caches(tiny_model):
    model = tiny_model("bloom")
    with pytest.raises(hpc.UnsupportedModelError, match="BloomForCausalLM does not generate on static caches"):
        generated(model, tokens(1, 6), cache_implementation="prefix-static")
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(hpc.UnsupportedModelError, match="BloomForCausalLM does not generate on static caches"):
        generated(model, tokens(1, 6), **hpc.compat.cache_argument(cache))


def test_a_cache_and_a_name_together_are_refused_as_in_transformers(tiny_model):
    model = tiny_model("llama")
    cache = hpc.PrefixDynamicCache(config=model.config)
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generated(model, tokens(1, 6), cache_implementation="prefix-dynamic", **hpc.compat.cache_argument(cache))
    assert cache.seq_length == 0
