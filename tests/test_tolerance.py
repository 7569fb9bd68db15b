import torch

from hf_prefix_cache.tolerance import differences, typical_difference


def test_differences_of_infinities_and_nans_are_told_apart():
    nan, inf = float("nan"), float("inf")
    expected, found = torch.tensor([1.0, nan, nan, -inf, -inf]), torch.tensor([1.5, nan, 1.0, -inf, 2.0])
    assert differences(expected, found).tolist() == [0.5, 0.0, inf, 0.0, inf]


def test_half_precision_is_judged_by_the_mean():
    apart = torch.tensor([0.0, 0.5])
    assert typical_difference(apart, torch.float32) == 0.5
    assert typical_difference(apart, torch.bfloat16) == 0.25
