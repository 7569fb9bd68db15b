"""``generate`` with ``prefix-quantized``: deterministic, kept apart from exact calls, options told from others."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import LossyPrefixError, UnknownOptionError, UnsupportedModelError
from hf_prefix_cache.layers.quantized_run import QuantizedRun
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

LENGTH = 120
SHORT = {"residual_length": 8}


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def generate(model, prompt, strategy="prefix-quantized", *, tokens=8, config=None, **kwargs):
    config = SHORT if config is None and strategy == "prefix-quantized" else config
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        do_sample=kwargs.pop("do_sample", False),
        cache_implementation=strategy,
        cache_config=config,
        **kwargs,
    )


def plain(model, prompt, *, tokens=8, **kwargs):
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **kwargs)


@pytest.fixture(params=["llama", "gemma3_text", "gpt2"])
def model(request):
    return TINY_MODELS[request.param]()


def test_repeated_calls_return_the_same_tokens_and_reuse_the_prompt(model):
    prompt = ids(1, LENGTH)
    first = generate(model, prompt)
    assert hpc.last_report(model).reused_tokens == 0
    second = generate(model, prompt)
    assert torch.equal(first, second)
    assert hpc.last_report(model).strategy == "prefix-quantized"
    assert hpc.last_report(model).computed_tokens == 1
    hpc.store_for(model).clear()
    fresh = generate(model, prompt)
    assert torch.equal(first, fresh)
    assert torch.equal(first, generate(model, prompt, config={**SHORT, "reuse": False}))


def test_8_bits_generate_what_exact_calls_generate(model):
    prompt = ids(2, LENGTH)
    prompt[1, :60] = prompt[0, :60]
    assert torch.equal(generate(model, prompt, config={**SHORT, "nbits": 8}), plain(model, prompt))


def test_the_shared_prefix_is_quantized_and_own_tokens_are_exact_unless_asked_for():
    model = TINY_MODELS["llama"]()
    prompt = ids(1, LENGTH)

    def quantized(**options):
        result = generate(model, prompt, tokens=60, config={**SHORT, **options}, return_dict_in_generate=True)
        state = result["cache" if "cache" in result else "past_key_values"].layers[0].state()
        return sum(part.tokens for part in state.segments if isinstance(part, QuantizedRun)), state.length

    assert quantized() == (96, 179)  # of 119 tokens 4 are at the start, and 19 do not fill a group
    assert quantized(quantize_own=True) == (160, 179)


def test_lossy_prefixes_never_serve_exact_calls_and_exact_ones_serve_lossy_calls():
    model = TINY_MODELS["llama"]()
    prompt = ids(1, LENGTH)
    expected = plain(model, prompt)
    generate(model, prompt)
    for strategy in ("prefix-dynamic", "prefix-offloaded", "prefix-static", "prefix-auto"):
        assert torch.equal(generate(model, prompt, strategy), expected)
        if strategy == "prefix-dynamic":
            assert hpc.last_report(model).reused_tokens == 0
    other = TINY_MODELS["llama"]()
    generate(other, prompt, "prefix-dynamic")
    assert torch.equal(generate(other, prompt), generate(model, prompt))
    assert hpc.last_report(other).computed_tokens == 1


def test_prefixes_of_other_bits_or_formats_are_kept_apart():
    model = TINY_MODELS["llama"]()
    prompt = ids(1, LENGTH)
    configs = ({"nbits": 8}, {"nbits": 4}, {"quant_type": "fp4"}, {"group_size": 64})
    first = [generate(model, prompt, config=config) for config in configs]
    for config, tokens in zip(configs, first, strict=True):
        assert torch.equal(generate(model, prompt, config=config), tokens)
        assert hpc.last_report(model).computed_tokens == 1
    generate(model, prompt, config={"nbits": 8, "exact_first": 0})
    assert hpc.last_report(model).reused_tokens == 0


def test_the_store_holds_quantized_prefixes_in_few_bytes():
    model, exact = TINY_MODELS["llama"](), TINY_MODELS["llama"]()
    prompt = ids(1, 230)
    generate(model, prompt, tokens=2)
    generate(exact, prompt, "prefix-dynamic", tokens=2)
    stores = hpc.store_for(model), hpc.store_for(exact)
    # Two ends are stored whole, and logits after one of them: the prompt, and the prompt with what was generated.
    assert stores[0].nbytes < 2 * 0.27 * stores[1].nbytes
    stores[0].sanity_check()
    longer = torch.cat([prompt, ids(1, 10)], dim=1)
    generate(model, longer, tokens=2)
    assert hpc.last_report(model).stored_tokens >= 229


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 16},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=lambda mode: "_".join(map(str, mode)),
)
def test_every_mode_repeats_itself_with_8_bits_close_to_exact(model, mode):
    prompt = ids(1, LENGTH)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(generate(model, prompt, config={**SHORT, "nbits": 8}, **mode))
    assert torch.equal(*results)
    if "num_beams" not in mode and "do_sample" not in mode:  # beams are compared by scores that differ little
        assert torch.equal(results[0], plain(model, prompt, **mode))


def test_padded_batches_share_a_quantized_prefix():
    model = TINY_MODELS["llama"]()
    prefix = ids(1, 80)
    short, long = torch.cat([prefix, ids(1, 3)], dim=1), torch.cat([prefix, ids(1, 9)], dim=1)
    batch = torch.cat([torch.nn.functional.pad(short, (6, 0)), long])
    mask = torch.ones_like(batch)
    mask[0, :6] = 0
    found = generate(model, batch, config={**SHORT, "nbits": 8}, attention_mask=mask)
    assert torch.equal(found, plain(model, batch, attention_mask=mask))
    assert hpc.last_report(model).reused_tokens == 80
    generate(model, short, config={**SHORT, "nbits": 8})
    assert hpc.last_report(model).computed_tokens == 1


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_hybrids_generate_with_their_attention_quantized(name):
    model = RECURRENT_MODELS[name]()
    prompt = ids(1, LENGTH)
    first = generate(model, prompt, config={**SHORT, "nbits": 8})
    assert torch.equal(first, generate(model, prompt, config={**SHORT, "nbits": 8}))
    assert hpc.last_report(model).computed_tokens == 1


def test_a_lossy_snapshot_is_used_by_calls_that_quantize_alike_and_refused_by_others():
    model = TINY_MODELS["llama"]()
    prompt = ids(1, LENGTH)
    cache = hpc.PrefixQuantizedCache(config=model.config, nbits=8, **SHORT)
    with torch.no_grad():
        model(prompt[:, :100], **hpc.compat.cache_argument(cache))
    prefix = cache.snapshot(model=model, input_ids=prompt[:, :100])
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-quantized")
    for _ in range(2):
        wrapped.generate(prompt, prefix=prefix, max_new_tokens=2, cache_config={**SHORT, "nbits": 8})
    hpc.store_for(model).clear()
    wrapped.generate(prompt, prefix=prefix, max_new_tokens=2, cache_config={**SHORT, "nbits": 8})
    assert hpc.last_report(model).stored_tokens == 100
    for options in ({}, {"cache_implementation": "prefix-dynamic"}):
        with pytest.raises(LossyPrefixError, match="cache_implementation"):
            wrapped.generate(prompt, prefix=prefix, max_new_tokens=2, **options)


def test_the_users_cache_config_is_not_changed():
    model = TINY_MODELS["llama"]()
    config = {"nbits": 8, "namespace": "a", **SHORT}
    before = dict(config)
    generate(model, ids(1, LENGTH), config=config)
    assert config == before


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        ("prefix-dynamic", {"nbits": 4}, "'nbits', which 'prefix-dynamic' does not have"),
        ("prefix-auto", {"backend": "bitsandbytes"}, "of 'prefix-quantized'"),
        ("prefix-quantized", {"bits": 4}, "'bits', which 'prefix-quantized' does not have"),
        ("prefix-quantized", {"nbits": 3}, "nbits is 3"),
        ("prefix-quantized", {"backend": "quanto"}, "backend is 'quanto'"),
        ("prefix-quantized", {"quantize_own": "yes"}, "quantize_own is 'yes'"),
        ("prefix-quantized", {"reuse": 1}, "reuse"),
    ],
)
def test_options_that_do_not_belong_are_refused_by_name_before_anything_runs(strategy, config, message):
    model = TINY_MODELS["llama"]()
    with pytest.raises(UnknownOptionError, match=message):
        generate(model, ids(1, 5), strategy, config=config)
    assert hpc.last_report(model) is None


def test_encoder_decoder_models_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(UnsupportedModelError, match="prefix-quantized"):
        generate(model, ids(1, 5) % 32)
