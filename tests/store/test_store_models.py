"""Prefixes of real architectures: stored, matched and continued, they give what the uncached model gives."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.fingerprint import fingerprint_of
from hf_prefix_cache.store import PrefixStore
from tiny_models import VOCAB_SIZE

TOKENS = 24


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "llama4"])
@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static"])
def test_a_matched_prefix_continues_as_if_it_had_just_been_computed(name, strategy, tiny_model):
    model = tiny_model(name)
    fingerprint = fingerprint_of(model)
    store = PrefixStore(max_bytes=1_000_000)
    text = torch.randint(0, VOCAB_SIZE, (1, TOKENS))
    for length in (7, 16, TOKENS):
        cache = hpc.PrefixDynamicCache(config=model.config)
        with torch.inference_mode():
            outputs = model(text[:, :length], **cache_argument(cache))
        ids = text[:, :length]
        store.insert(cache.snapshot(model=model, input_ids=ids, next_logits=outputs.logits[:, -1]))
        store.sanity_check()
    reused = set()
    for shared in range(1, TOKENS + 1):
        prompt = torch.cat([text[:, :shared], torch.randint(0, VOCAB_SIZE, (1, 3))], dim=1)
        with torch.no_grad():
            expected = model(prompt).logits
        found = store.match(prompt, fingerprint)
        if found is None:
            continue
        reused.add(found.seq_length)
        options = {"max_cache_len": 32} if strategy == "prefix-static" else {}
        cache = found.to_cache(strategy, **options)
        with torch.no_grad():
            logits = model(prompt[:, found.seq_length :], **cache_argument(cache)).logits
        torch.testing.assert_close(logits, expected[:, found.seq_length :], atol=1e-4, rtol=0)
        if found.next_logits is not None:
            torch.testing.assert_close(found.next_logits, expected[:, found.seq_length - 1], atol=1e-4, rtol=0)
    assert reused >= {7, 15, 16, 23, 24}  # windows keep one token more than they need
    if name == "llama":
        assert reused >= set(range(1, TOKENS + 1))
    store.sanity_check()


def test_continuing_a_matched_prefix_leaves_the_store_as_it_was(tiny_model):
    model = tiny_model("mistral")
    store = PrefixStore(max_bytes=1_000_000)
    text = torch.randint(0, VOCAB_SIZE, (1, TOKENS))
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(text, **cache_argument(cache))
    store.insert(cache.snapshot(model=model, input_ids=text))
    found = store.match(text, fingerprint_of(model))
    before = [tensor.clone() for tensor in found.tensors]
    for _ in range(2):
        with torch.no_grad():
            model.generate(text, max_new_tokens=12, do_sample=False, **cache_argument(found.crop_to(23).to_cache()))
        continued = found.to_cache()
        with torch.no_grad():
            model(text[:, :5], **cache_argument(continued))
        continued.crop_to(TOKENS + 4)
    after = store.match(text, fingerprint_of(model))
    assert all(torch.equal(*pair) for pair in zip(before, after.tensors, strict=True))
    store.sanity_check()
