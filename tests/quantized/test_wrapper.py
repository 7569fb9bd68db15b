"""`PrefixCachedModel` with quantized and offloaded prefixes."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import LossyPrefixError, UnknownOptionError
from tiny_models import TINY_MODELS

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

SHORT = {"nbits": 8, "residual_length": 8}


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


@pytest.fixture(params=["llama", "gemma3_text"])
def model(request):
    model = TINY_MODELS[request.param]()
    model.generation_config.cache_config = dict(SHORT)
    return model


def test_prefill_quantizes_and_generate_starts_from_it(model):
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-quantized")
    text = ids(1, 120)
    prefix = wrapped.prefill(text[:, :100])
    assert prefix.is_lossy
    assert prefix.strategy == "prefix-quantized"
    assert 0 < max(prefix.error.keys) < 0.02
    assert prefix.next_logits.shape == (1, 99)
    assert wrapped.prefill(text[:, :100]).nbytes <= prefix.nbytes  # known by now
    output = wrapped.generate(text, prefix=prefix, max_new_tokens=4, do_sample=False)
    assert wrapped.report().stored_tokens == 100
    assert wrapped.report().error.keys == prefix.error.keys
    plain = model.generate(
        text, max_new_tokens=4, do_sample=False, cache_implementation="prefix-dynamic", cache_config=None
    )
    assert torch.equal(output, plain)
    assert wrapped.report().error is None


def test_an_exact_prefix_that_is_known_is_quantized_not_returned(model):
    text = ids(1, 100)
    exact = hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(text)
    assert not exact.is_lossy
    found = hpc.PrefixCachedModel(model, strategy="prefix-quantized").prefill(text)
    assert found.is_lossy
    torch.testing.assert_close(found.next_logits, exact.next_logits, atol=0.3, rtol=0)
    assert not hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(text).is_lossy


@pytest.mark.parametrize("is_padded", [False, True])
def test_forward_continues_a_quantized_prefix_with_exact_suffixes(model, is_padded):
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-quantized")
    text, suffixes = ids(1, 100), ids(2, 50)
    mask = torch.ones_like(suffixes)
    if is_padded:
        mask[1, 30:] = 0
    prefix = wrapped.prefill(text)
    with torch.no_grad():
        logits = wrapped.forward(suffixes, prefix=prefix, attention_mask=mask).logits
        for row, length in enumerate(mask.sum(1).tolist()):
            alone = model(
                input_ids=suffixes[row : row + 1, :length],
                **hpc.compat.cache_argument(prefix.to_cache(quantize_own=False)),
            ).logits
            torch.testing.assert_close(logits[row : row + 1, :length], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("strategy", ["prefix-quantized", "prefix-offloaded"])
def test_forward_takes_exact_prefixes(model, strategy):
    prefix = hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(ids(1, 100))
    suffixes = ids(2, 6)
    if strategy == "prefix-offloaded":
        model.generation_config.cache_config = None
    with torch.no_grad():
        found = hpc.PrefixCachedModel(model, strategy=strategy).forward(suffixes, prefix=prefix).logits
        exact = hpc.PrefixCachedModel(model).forward(suffixes, prefix=prefix).logits
    torch.testing.assert_close(found, exact, atol=0.3 if strategy == "prefix-quantized" else 1e-5, rtol=0)
    assert torch.equal(found, exact) == (strategy == "prefix-offloaded")


def test_exact_wrappers_refuse_lossy_prefixes(model):
    prefix = hpc.PrefixCachedModel(model, strategy="prefix-quantized").prefill(ids(1, 100))
    for strategy in ("prefix-auto", "prefix-dynamic", "prefix-static", "prefix-offloaded"):
        with pytest.raises(LossyPrefixError, match="strategy='prefix-quantized'"):
            hpc.PrefixCachedModel(model, strategy=strategy).forward(ids(1, 2), prefix=prefix)


def test_a_conversation_branches_from_a_quantized_prefix(model):
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-quantized")
    text = ids(1, 110)
    prefix = wrapped.prefill(text[:, :100])
    with wrapped.branch(prefix) as branch:
        start = branch.mark()
        first = branch.generate(text, max_new_tokens=3, do_sample=False)
        branch.rollback(start)
        assert torch.equal(branch.generate(text, max_new_tokens=3, do_sample=False), first)
        kept = branch.commit()
    assert kept.is_lossy
    assert kept.seq_length == 112


def test_offloaded_prefills_live_in_host_memory_and_are_exact(model):
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-offloaded")
    text = ids(1, 60)
    with pytest.raises(UnknownOptionError, match="'nbits', 'residual_length', which 'prefix-offloaded'"):
        wrapped.prefill(text)
    model.generation_config.cache_config = None
    prefix = wrapped.prefill(text[:, :50])
    assert not prefix.is_lossy
    assert all(tensor.device.type == "cpu" for tensor in prefix.tensors)
    output = wrapped.generate(text, prefix=prefix, max_new_tokens=4, do_sample=False, cache_config=None)
    assert torch.equal(output, model.generate(text, max_new_tokens=4, do_sample=False, cache_config=None))


def test_options_in_the_models_settings_are_checked():
    model = TINY_MODELS["llama"]()
    model.generation_config.cache_config = {"nbits": 5}
    with pytest.raises(UnknownOptionError, match="nbits is 5"):
        hpc.PrefixCachedModel(model, strategy="prefix-quantized").prefill(ids(1, 9))
    hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(ids(1, 9))
