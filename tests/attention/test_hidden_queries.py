"""Queries that see the shared prefix and none of their own tokens, by any mask that Transformers may pass."""

import pytest
import torch

from hf_prefix_cache.attention import interface
from hf_prefix_cache.layers import KeyValues
from hf_prefix_cache.layers.deferred import SharedPart, attach


@pytest.mark.parametrize("mask_of", ["boolean", "minus infinity", "lowest number"])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2)], ids=["multi-head", "grouped"])
@torch.no_grad()
def test_a_query_that_sees_the_prefix_alone_is_the_query_on_the_prefix_alone(heads, key_heads, mask_of, monkeypatch):
    def ordinary(*arguments, **kwargs):
        raise AssertionError("these inputs are served apart")

    monkeypatch.setattr(interface, "_original", [ordinary])
    prefix = KeyValues(torch.randn(1, key_heads, 11, 16), torch.randn(1, key_heads, 11, 16))
    query = torch.randn(2, heads, 3, 16)
    own_keys, own_values = torch.randn(2, key_heads, 5, 16), torch.randn(2, key_heads, 5, 16)
    visible = torch.rand(2, 1, 3, 16) > 0.3
    visible[..., :12] = True
    visible[1, :, 1, 11:] = False
    mask = visible
    if mask_of != "boolean":
        hidden = float("-inf") if mask_of == "minus infinity" else torch.finfo(torch.float32).min
        mask = torch.zeros(visible.shape).masked_fill(~visible, hidden)
    keys = attach(own_keys, SharedPart((prefix,)))
    output, _ = interface._attention(torch.nn.Module(), query, keys, own_values, mask, scaling=0.25)
    group = heads // key_heads
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([prefix.keys.expand(2, -1, -1, -1), own_keys], 2).repeat_interleave(group, 1),
        torch.cat([prefix.values.expand(2, -1, -1, -1), own_values], 2).repeat_interleave(group, 1),
        attn_mask=visible,
        scale=0.25,
    )
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_mask_that_comes_again_for_another_prefix_or_changed_in_place_is_looked_at_again():
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    mask[..., 12] = False
    assert interface._sees_all(mask, 10)
    assert interface._sees_all(mask, 10)
    assert not interface._sees_all(mask, 15)
    assert interface._sees_all(mask, 10)
    mask[..., 3] = False
    assert not interface._sees_all(mask, 10)
