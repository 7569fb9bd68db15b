"""Suffixes through the wrapper, alone and in batches of unequal lengths, for every strategy and architecture."""

import pytest
import torch
from cache_oracles import LENGTH, assert_exact
from transformers import DynamicCache

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import resumes_in_one_call, runs_on_static_caches
from hf_prefix_cache.compat import cache_argument, takes_cache
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

MODELS = {**TINY_MODELS, **RECURRENT_MODELS}
STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-offloaded")
SUFFIXES = (1, 2, 5)
SOME_SPLITS = (7, 16)  # within a window, and behind it
EVERY_SPLIT = range(1, LENGTH)
GROUP = 32  # tokens that are quantized together


def ids(*shape):
    return torch.randint(1, 99, shape)


def load(name):
    model = MODELS[name]()
    if not takes_cache(model):
        pytest.skip("Mamba's own classes name their cache otherwise before 5.24, and are refused there")
    return model


def deviation_of_transformers(model, whole, split, expected):
    """What plain Transformers' own cache is off by, fed as it is right."""
    cache, own = DynamicCache(config=model.config), 0.0
    model(whole[:, :split], **cache_argument(cache))
    step = 1 if name_of(model) in RECURRENT_MODELS and not resumes_in_one_call(model.config) else whole.shape[1]
    for part, answer in zip(whole[:, split:].split(step, 1), expected.split(step, 1), strict=True):
        own = max(own, (model(part, **cache_argument(cache)).logits - answer).abs().max().item())
    return own


def name_of(model):
    return model.config.model_type


def check(model, strategy, splits):
    """Compare with uncached rows at ``splits``: each suffix alone, then all of them as one padded batch."""
    wrapped, text = hpc.PrefixCachedModel(model, strategy=strategy), ids(1, LENGTH)
    width = max(SUFFIXES)
    for split in splits:
        suffixes = ids(len(SUFFIXES), width)
        whole = torch.cat([text[:, :split].expand(len(SUFFIXES), -1), suffixes], dim=1)
        expected = model(whole, use_cache=False).logits[:, split:]
        allowed = max(1e-4, 2 * deviation_of_transformers(model, whole, split, expected))
        prefix = wrapped.prefill(text[:, :split])
        before = [tensor.clone() for tensor in prefix.tensors]
        mask = torch.zeros(len(SUFFIXES), width, dtype=torch.long)
        for row, count in enumerate(SUFFIXES):
            alone = wrapped.forward(suffixes[row : row + 1, :count], prefix=prefix).logits
            torch.testing.assert_close(alone, expected[row : row + 1, :count], atol=allowed, rtol=0)
            mask[row, :count] = 1
        for side in ("right", "left"):
            rows, shown = suffixes, mask
            if side == "left":
                rows = torch.stack([row.roll(width - count) for row, count in zip(rows, SUFFIXES, strict=True)])
                shown = mask.flip(1)
            logits = wrapped.forward(rows, prefix=prefix, attention_mask=shown).logits
            for row, count in enumerate(SUFFIXES):
                found = logits[row, shown[row].bool()]
                torch.testing.assert_close(found, expected[row, :count], atol=allowed, rtol=0)
        for tensor, kept in zip(prefix.tensors, before, strict=True):
            assert torch.equal(tensor, kept)


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_suffixes_behind_a_prefix_equal_uncached_rows(name, strategy):
    if name == "bloom" and strategy == "prefix-static" and not runs_on_static_caches(MODELS[name]()):
        pytest.skip("before 5.24 Bloom's biases without a mask are too short for any static cache")
    check(load(name), strategy, SOME_SPLITS)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_suffixes_behind_a_prefix_equal_uncached_rows_at_every_split(name, strategy):
    if name == "bloom" and strategy == "prefix-static" and not runs_on_static_caches(MODELS[name]()):
        pytest.skip("before 5.24 Bloom's biases without a mask are too short for any static cache")
    check(load(name), strategy, EVERY_SPLIT)


def check_quantized(name, splits):
    """Compare with an exact cache that holds what was quantized, decoded."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    model = load(name)
    model.generation_config.cache_config = {"nbits": 4, "residual_length": 2, "exact_first": 1}
    wrapped, text = hpc.PrefixCachedModel(model, strategy="prefix-quantized"), ids(1, GROUP + LENGTH)
    step = 1 if name in RECURRENT_MODELS and not resumes_in_one_call(model.config) else max(SUFFIXES)
    for split in splits:
        prefix = wrapped.prefill(text[:, : GROUP + split])
        assert prefix.is_lossy
        suffixes = ids(len(SUFFIXES), max(SUFFIXES))
        mask = torch.tensor([[1] * count + [0] * (max(SUFFIXES) - count) for count in SUFFIXES])
        logits = wrapped.forward(suffixes, prefix=prefix, attention_mask=mask).logits
        for row, count in enumerate(SUFFIXES):
            alone = wrapped.forward(suffixes[row : row + 1, :count], prefix=prefix).logits
            decoded = prefix.to_cache("prefix-dynamic", allow_lossy=True)
            parts = suffixes[row : row + 1, :count].split(step, 1)
            expected = torch.cat([model(part, **cache_argument(decoded)).logits for part in parts], dim=1)
            assert_exact(alone, expected)
            assert_exact(logits[row : row + 1, :count], expected)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_suffixes_behind_a_quantized_prefix_equal_those_behind_its_decoded_values(name):
    check_quantized(name, SOME_SPLITS)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_suffixes_behind_a_quantized_prefix_equal_those_behind_its_decoded_values_at_every_split(name):
    check_quantized(name, EVERY_SPLIT)
