"""Prefixes computed with gradients, without them and in inference mode, continued in any of these."""

import copy

import pytest
import torch
from cache_oracles import (
    LENGTH,
    STRATEGIES,
    addresses,
    assert_exact,
    assert_unchanged,
    cached,
    contents,
    filled,
    new_cache,
    options_of,
    random_ids,
    uncached,
)
from transformers import DynamicCache

from tiny_models import TINY_MODELS

MODES = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
SPLIT = 13  # beyond the windows of 8


@pytest.fixture(params=["llama", "gemma3_text", "llama4"])
def model(request):
    return TINY_MODELS[request.param]()


def gradients(model, logits):
    """The gradients of the sum of squares of ``logits``, one flat tensor; the model's own are cleared."""
    model.zero_grad()
    logits.square().sum().backward()
    flat = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in flat])


def assert_same_gradients(found, expected):
    assert expected.abs().max() > 1
    torch.testing.assert_close(found / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("after", MODES)
@pytest.mark.parametrize("before", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prefix_of_any_autograd_mode_continues_in_any_other(model, strategy, before, after):
    text = random_ids(1, LENGTH)
    expected = uncached(model, text).detach()
    with MODES[before]():
        cache = filled(strategy, model, text[:, :SPLIT])
        snapshot, fork = cache.snapshot(), cache.fork()
    kept = contents(snapshot)
    with MODES[after]():
        for holder in (cache, fork, cache.fork(), snapshot.to_cache(**options_of(strategy))):
            assert_exact(cached(model, text[:, SPLIT:20], holder), expected[:, SPLIT:20])
            assert_exact(cached(model, text[:, 20:21], holder), expected[:, 20:21])
            holder.crop(-1)
            assert_exact(cached(model, text[:, 20:], holder), expected[:, 20:])
        cache.restore(snapshot)
        cache.batch_repeat_interleave(1)
        cache.reorder_cache(torch.tensor([0]))
        assert_exact(cached(model, text[:, SPLIT:], cache), expected[:, SPLIT:])
    assert_unchanged(snapshot, kept)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_caches_made_in_inference_mode_keep_their_addresses_or_contents_outside(model, strategy):
    text = random_ids(1, LENGTH)
    with torch.inference_mode():
        cache = filled(strategy, model, text[:, :SPLIT])
    places = addresses(cache)
    with torch.no_grad():
        cached(model, text[:, SPLIT:], cache)
        cache.crop(-1)
        cache.reset()
        assert_exact(cached(model, text, cache), uncached(model, text))
    assert strategy == "prefix-dynamic" or addresses(cache) == places


def test_deepcopy_snapshot_fork_and_crop_work_after_a_prefill_with_gradients(model):
    text = random_ids(1, LENGTH)
    expected = uncached(model, text)
    for strategy in STRATEGIES:
        cache = filled(strategy, model, text[:, :SPLIT])
        snapshot = cache.snapshot()
        assert not any(tensor.requires_grad for tensor in snapshot.tensors)
        for other in (copy.deepcopy(cache), cache.fork(), cache):
            assert_exact(cached(model, text[:, SPLIT : SPLIT + 1], other), expected[:, SPLIT : SPLIT + 1])
            other.crop(-1)
            assert_exact(cached(model, text[:, SPLIT:], other), expected[:, SPLIT:])


def test_gradients_through_a_fork_equal_those_of_a_plain_cache_and_of_no_cache(model):
    text = random_ids(1, LENGTH)
    plain = DynamicCache(config=model.config)
    cached(model, text[:, :SPLIT], plain)
    expected = gradients(model, cached(model, text[:, SPLIT:], plain))
    cache = filled("prefix-dynamic", model, text[:, :SPLIT])
    found = gradients(model, cached(model, text[:, SPLIT:], cache.fork().fork()))
    assert_same_gradients(found, expected)
    assert_same_gradients(found, gradients(model, uncached(model, text)[:, SPLIT:]))


def test_gradients_through_a_batch_fork_equal_those_of_repeated_rows(model):
    prefix, suffixes = random_ids(1, SPLIT), random_ids(3, 6)
    whole = torch.cat([prefix.expand(3, -1), suffixes], dim=1)
    expected = gradients(model, model(input_ids=whole).logits[:, SPLIT:])
    batch = filled("prefix-dynamic", model, prefix).fork(batch_size=3)
    first = cached(model, suffixes[:, :4], batch)
    found = gradients(model, torch.cat([first, cached(model, suffixes[:, 4:], batch)], dim=1))
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_a_suffix_on_a_prefix_without_gradients_equal_those_of_a_plain_cache(model, strategy):
    text = random_ids(1, LENGTH)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        cached(model, text[:, :SPLIT], plain)
        snapshot = filled(strategy, model, text[:, :SPLIT]).snapshot()
    expected = gradients(model, cached(model, text[:, SPLIT:], plain))
    cache = snapshot.to_cache(**options_of(strategy))
    for _ in range(2):  # a second step of training restores the prefix and finds no graph of the first
        assert_same_gradients(gradients(model, cached(model, text[:, SPLIT:], cache)), expected)
        cache.restore(snapshot)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_snapshot_survives_an_optimizer_step_on_the_suffix(strategy):
    model = TINY_MODELS["llama"]()
    text = random_ids(1, LENGTH)
    with torch.no_grad():
        snapshot = filled(strategy, model, text[:, :SPLIT]).snapshot(model=model)
    before = contents(snapshot)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cached(model, text[:, SPLIT:], snapshot.to_cache(**options_of(strategy))).square().mean().backward()
    optimizer.step()
    assert_unchanged(snapshot, before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autograd_modes_may_change_at_every_step(model, strategy):
    text = random_ids(1, LENGTH)
    expected = uncached(model, text).detach()
    cache = new_cache(strategy, model)
    modes = (
        "no_grad",
        "gradients",
        "no_grad",
        "inference_mode",
        "no_grad",
        "gradients",
        "inference_mode",
        "gradients",
    )
    for step, mode in enumerate(modes):
        with MODES[mode]():
            logits = cached(model, text[:, 3 * step : 3 * step + 3], cache)
            assert_exact(logits, expected[:, 3 * step : 3 * step + 3])
