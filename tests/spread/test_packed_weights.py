"""Models whose weights bitsandbytes has packed into 8 or 4 bits: every strategy is as exact as Transformers' cache."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, LlamaConfig

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.fingerprint import fingerprint_of
from tiny_models import DECODER, build

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning", "ignore:.*gemm_4bit.*:UserWarning")

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-offloaded", "prefix-quantized")
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
FORMATS = {
    "8bit": {"load_in_8bit": True},
    "nf4": FOUR_BITS,
    "nf4_twice": {**FOUR_BITS, "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk, whose matrices are large enough to be packed."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    build(LlamaConfig(**{**DECODER, **sizes})).save_pretrained(path)
    return path


def load(folder, form):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**FORMATS[form]), dtype=torch.float32, device_map="cpu"
    )
    with torch.no_grad():
        model(tokens(1, 3))  # the first forward packs once more for some processors
    return model.eval()


@pytest.fixture(scope="module", params=FORMATS)
def model(request, folder):
    return load(folder, request.param)


def cache_options(strategy):
    return {"cache_config": {"nbits": 8}} if strategy == "prefix-quantized" else {}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate_equals_the_uncached_call_and_reuses(model, strategy):
    hpc.store_for(model).clear()
    prompt, options = tokens(1, 30), {"cache_implementation": strategy, **cache_options(strategy)}
    expected = generated(model, prompt)
    for reused in (0, 29):
        assert torch.equal(generated(model, prompt, **options), expected)
        assert hpc.last_report(model).reused_tokens == reused
    batch = torch.cat([prompt.expand(2, -1), tokens(2, 1, seed=1)], dim=1)
    generated(model, batch, **options)
    assert hpc.last_report(model).reused_tokens >= 29


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_behind_a_prefix_deviates_no_more_than_transformers_own_cache(model, strategy):
    # 8 bits look for outliers in all tokens of a call, so that no cache gives what one call for all tokens gives.
    wrapped, text = hpc.PrefixCachedModel(model, strategy=strategy), tokens(1, 24, seed=2)
    with torch.no_grad():
        expected = model(text).logits
        for split in (7, 15):
            plain = DynamicCache(config=model.config)
            model(text[:, :split], **cache_argument(plain))
            own = (model(text[:, split:], **cache_argument(plain)).logits - expected[:, split:]).abs().max().item()
            logits = wrapped.forward(text[:, split:], prefix=wrapped.prefill(text[0, :split])).logits
            torch.testing.assert_close(logits, expected[:, split:], atol=max(1e-4, 2 * own), rtol=0)


def test_scores_are_those_of_uncached_rows(model):
    contexts = tokens(2, 12, seed=3)
    contexts[1, :9] = contexts[0, :9]
    requests = [(context.tolist(), continuation) for context in contexts for continuation in ([5, 6], [7])]
    # With 8 bits, tokens of one call look for outliers together. The self-check sees that packed rows are off, and
    # what is left is what plain rows differ by among themselves, fed alone or together, with or without a last token.
    finds_outliers = model.config.quantization_config.load_in_8bit
    with pytest.warns(UserWarning, match="row by row") if finds_outliers else nullcontext():
        scores = hpc.loglikelihood(model, requests, progress=False)
    for (context, continuation), score in zip(requests, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
        torch.testing.assert_close(score.logprob, float(expected), atol=0.3 if finds_outliers else 1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_the_fingerprint_covers_bits_and_scales_and_stays(form, folder):
    model, same = load(folder, form), load(folder, form)
    before = fingerprint_of(model)
    generated(model, tokens(1, 5))
    assert fingerprint_of(model) == before == fingerprint_of(same)
    linear = model.model.layers[1].mlp.up_proj
    if form == "8bit":
        scales = linear.weight.SCB if linear.weight.SCB is not None else linear.state.SCB
    else:
        scales = linear.weight.quant_state.absmax
    changed = scales + 1 if scales.dtype == torch.uint8 else scales * 2
    scales.copy_(changed)
    assert fingerprint_of(model) != before
    with torch.no_grad():
        same.model.layers[0].self_attn.q_proj.weight.data.view(-1)[3] += 1
    hpc.invalidate(same)
    assert fingerprint_of(same) != before
