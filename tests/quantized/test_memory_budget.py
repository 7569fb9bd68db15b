"""A wrapper with a memory budget keeps a long document within it, and says what it gave up."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import CacheCapacityError, LossyPrefixError
from tiny_models import TINY_MODELS

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

LENGTH = 240
NEEDED = LENGTH * 2 * 2 * 2 * 8 * 4  # bytes of the document's keys and values, in two layers of two heads


def document():
    return torch.randint(1, 99, (1, LENGTH))


def wrapped(budget, **options):
    return hpc.PrefixCachedModel(TINY_MODELS["llama"](), memory_budget=int(budget), **options)


def held(model, *snapshots):
    store = hpc.store_for(model.model)
    store.sanity_check()
    inside = store.match(snapshots[0].input_ids[0], snapshots[0].fingerprint, strategy=snapshots[0].lossy_key)
    return hpc.total_nbytes([inside, *snapshots])


@pytest.mark.parametrize(
    ("part", "nbits"), [(2.1, None), (1.1, 8), (0.8, 4)], ids=["all of it", "half of it", "a third of it"]
)
def test_a_document_is_held_in_as_many_bits_as_the_budget_allows(part, nbits):
    text = document()
    model = wrapped(part * NEEDED)
    prefix = model.prefill(text)
    assert held(model, prefix) <= part * NEEDED
    assert hpc.store_for(model.model).nbytes <= part * NEEDED
    assert model.choice.predicted_bytes <= part * NEEDED / 2
    assert prefix.is_lossy == (nbits is not None)
    if nbits is None:
        assert model.choice.strategy == "prefix-dynamic"
    else:
        assert model.choice.options == {"nbits": nbits}
        assert f"no exact strategy fits, so that it is quantized to {nbits} bits: keys" in str(model.choice)
        assert max(prefix.error.keys) > 0
    assert model.prefill(text).nbytes == prefix.nbytes


def test_prompts_behind_a_quantized_document_start_from_it():
    text = document()
    model = wrapped(1.1 * NEEDED)
    prefix = model.prefill(text)
    prompt = torch.cat([text, torch.randint(1, 99, (1, 5))], dim=1)
    output = model.generate(prompt, prefix=prefix, max_new_tokens=4, do_sample=False)
    assert model.report().strategy == "prefix-quantized"
    assert model.report().reused_tokens == LENGTH
    expected = model.model.generate(
        prompt,
        max_new_tokens=4,
        do_sample=False,
        cache_implementation="prefix-quantized",
        cache_config={"nbits": 8},
    )
    assert torch.equal(output, expected)
    settings = model.model.generation_config
    again = model.generate(prompt, prefix=prefix, generation_config=settings, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, expected)
    with torch.no_grad():
        logits = model.forward(prompt[:, LENGTH:], prefix=prefix).logits
    assert logits.shape == (1, 5, 99)


def test_a_call_without_a_prefix_keeps_to_the_budget_too():
    prompt = document()
    model = wrapped(1.2 * NEEDED)
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert model.report().strategy == "prefix-quantized"
    assert model.choice.options == {"nbits": 8}
    model.generate(prompt[:, :50], max_new_tokens=4, do_sample=False)
    assert model.report().strategy == "prefix-dynamic"
    model.generate(prompt, max_new_tokens=4, do_sample=False, cache_implementation="prefix-dynamic")
    assert model.report().strategy == "prefix-dynamic"


def test_what_fits_in_no_form_is_refused_before_anything_is_computed():
    model = wrapped(0.2 * NEEDED)
    for call in (model.prefill, model.generate):
        with pytest.raises(CacheCapacityError, match=r"may take .* no exact .* \(half of memory_budget="):
            call(document())
    assert len(hpc.store_for(model.model)) == 0


def test_a_strategy_that_is_named_stays_and_without_a_budget_nothing_is_lossy():
    text = document()
    model = wrapped(1.1 * NEEDED, strategy="prefix-dynamic")
    assert not model.prefill(text).is_lossy
    assert model.choice is None
    lossy = wrapped(1.1 * NEEDED).prefill(text)
    plain = hpc.PrefixCachedModel(TINY_MODELS["llama"]())
    assert plain.choice is None
    with pytest.raises(LossyPrefixError):
        plain.forward(text[:, :2], prefix=lossy)
