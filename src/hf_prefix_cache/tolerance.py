"""How far two computations of the same logits may be apart: rounding, and nothing else."""

from typing import Any

import torch

from .weights import input_device

__all__ = ["TOLERANCES", "differences", "is_judged_by_mean", "judged_dtype", "typical_difference"]

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}
"""Difference of logits and log-probabilities that counts as rounding, by the model's dtype.

From float32 on it is the largest of any value. In half precision the order of a sum alone moves single tokens by
tenths, so there it is the mean, which finds gross errors only; the same code in float32 is held to 1e-4.
"""


def judged_dtype(model: Any) -> torch.dtype:
    """Return the dtype, of those in `TOLERANCES`, as which the rounding of ``model`` counts; bfloat16 in autocast."""
    is_mixed = torch.is_autocast_enabled(input_device(model).type)
    return model.dtype if model.dtype in TOLERANCES and not is_mixed else torch.bfloat16


def is_judged_by_mean(dtype: torch.dtype) -> bool:
    """Return whether the mean of the differences counts, and not the largest."""
    return dtype.itemsize < 4


def differences(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return absolute differences; the same infinity or NaN on both sides is none, NaN on one side an infinite one."""
    alike = (expected == found) | (expected.isnan() & found.isnan())
    apart = torch.where(alike, 0.0, (expected - found).abs())
    return torch.where(apart.isnan(), torch.inf, apart)


def typical_difference(apart: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the one of the differences ``apart`` that counts for models of ``dtype``."""
    if not apart.numel():
        return 0.0
    return float(apart.mean() if is_judged_by_mean(dtype) else apart.max())
