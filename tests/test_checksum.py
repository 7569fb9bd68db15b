"""The checksum of a tensor sees every changed value, wherever the tensor begins."""

import pytest
import torch

from hf_prefix_cache.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 7, 1_000, 2**17 // 4 + 3])
def test_the_checksum_sees_every_single_value_and_every_swap_and_sign(dtype, size):
    tensor = torch.randn(size).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, (size,)).to(dtype)
    tensor[0] = 1
    whole = tensor_checksum(tensor)
    assert whole == tensor_checksum(tensor.clone()) == tensor_checksum(tensor[None])
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] = not changed[place] if dtype == torch.bool else -changed[place] + (changed[place] == 0)
        assert tensor_checksum(changed) != whole
    if dtype.is_floating_point:
        assert tensor_checksum(-tensor) != whole
    if size > 1:
        swapped = torch.arange(size) % 2
        assert tensor_checksum(swapped.to(dtype)) != tensor_checksum(swapped.flip(0).to(dtype)) or size % 2


def test_the_checksum_reads_views_that_start_anywhere():
    whole = torch.randn(100, dtype=torch.float32).bfloat16()
    for start in range(5):
        assert tensor_checksum(whole[start:]) == tensor_checksum(whole[start:].clone())
    square = torch.randn(8, 8)
    assert tensor_checksum(square.T) == tensor_checksum(square.T.contiguous()) != tensor_checksum(square)


def test_an_empty_tensor_has_a_checksum():
    assert tensor_checksum(torch.zeros(0)) == tensor_checksum(torch.zeros(0))
