"""Layers on their own: what other caches and Transformers may ask of one without going through a prefix cache."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_prefix_cache.layers import (
    PrefixDynamicLayer,
    PrefixDynamicSlidingWindowLayer,
    PrefixStaticLayer,
    PrefixStaticSlidingWindowLayer,
)

WINDOW = 6
LAYERS = {
    "dynamic": PrefixDynamicLayer,
    "dynamic sliding": lambda: PrefixDynamicSlidingWindowLayer(WINDOW),
    "static": lambda: PrefixStaticLayer(16),
    "static sliding": lambda: PrefixStaticSlidingWindowLayer(16, WINDOW),
}


def tokens(rows, count, dtype=torch.float32):
    return torch.randn(rows, 2, count, 4, dtype=dtype), torch.randn(rows, 2, count, 3, dtype=dtype)


@pytest.fixture(params=LAYERS)
def filled(request):
    """A layer, and the keys and values it was given: heads of values are narrower than those of keys."""
    layer = LAYERS[request.param]()
    if "static" in request.param:
        layer.max_batch_size = 4
    held = tokens(2, 5)
    layer.update(*held)
    return layer, held


def assert_holds(layer, keys, values):
    (held,) = layer.state().segments
    assert torch.equal(held.keys, keys)
    assert torch.equal(held.values, values)


def test_a_layer_crops_by_transformers_rule(filled):
    layer, (keys, values) = filled
    layer.crop(0)
    assert_holds(layer, keys, values)
    layer.crop(-2)
    assert_holds(layer, keys[:, :, :3], values[:, :, :3])
    layer.crop(-3)
    assert (layer.seen(), layer.rows) == (0, None)


def test_a_layer_repeats_and_selects_its_rows(filled):
    layer, (keys, values) = filled
    layer.batch_repeat_interleave(2)
    assert_holds(layer, keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0))
    layer.batch_select_indices(torch.tensor([3, 0]))
    assert_holds(layer, keys[[1, 0]], values[[1, 0]])
    layer.batch_select_indices(torch.tensor([False, True]))
    assert_holds(layer, keys[:1], values[:1])


def test_the_rows_of_an_empty_layer_need_no_order():
    for make in LAYERS.values():
        layer = make()
        layer.reorder_cache(torch.tensor([0]))
        layer.batch_repeat_interleave(3)
        layer.batch_select_indices(torch.tensor([0]))
        assert layer.rows is None
        assert layer.tensors() == []


def test_keys_of_growing_layers_read_as_transformers_layers_keep_them():
    for ours, theirs in (
        (PrefixDynamicLayer(), DynamicLayer()),
        (PrefixDynamicSlidingWindowLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)),
    ):
        for count in (1, 3, 2, 9, 1):
            added = tokens(1, count)
            ours.update(*added)
            theirs.update(*added)
            kept = theirs.keys.shape[2]  # of a window one token more is kept, for taking the last one back
            assert torch.equal(ours.keys[:, :, -kept:], theirs.keys)
            assert torch.equal(ours.values[:, :, -kept:], theirs.values)


@pytest.mark.parametrize("make", [PrefixDynamicLayer, lambda: PrefixDynamicSlidingWindowLayer(WINDOW)])
def test_tokens_of_a_wider_dtype_promote_what_is_held_as_in_transformers(make):
    ours, theirs = make(), DynamicLayer()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            added = tokens(1, 2, dtype)
            found, expected = ours.update(*added), theirs.update(*added)
            for mine, right in zip(found, expected, strict=True):
                assert mine.dtype == right.dtype
                assert torch.equal(mine, right[:, :, -mine.shape[2] :])
