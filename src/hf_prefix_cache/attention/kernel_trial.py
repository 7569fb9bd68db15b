"""Trying out an attention kernel before results rely on it: it is used only where it agrees with `attend_plainly`.

PyTorch's fused kernels have no public interface that returns the log-sum-exp, and differ between devices, dtypes and
releases. So each is run once on small random inputs, for every kind of inputs that it is wanted for.
"""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from .plain import attend_plainly

__all__ = ["Kernel", "KernelCase", "distrust", "is_trusted"]

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], tuple[torch.Tensor, torch.Tensor]
]

# Allowed differences of outputs and of log-sum-exps. float32 computed as TF32 is off by 1e-3 and refused.
_TOLERANCES = {torch.float32: (3e-5, 3e-5), torch.float16: (5e-3, 2e-3), torch.bfloat16: (3e-2, 2e-3)}
# Rows, heads, queries and keys: queries no multiple of 32 and keys none of 8, a single query with so many keys that
# they are split between blocks, a single key.
_SIZES = ((2, 3, 37, 13), (1, 2, 1, 1037), (3, 1, 129, 1))
_HIDDEN = -3e4  # a log-sum-exp below is that of hidden keys

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_trusted: dict[tuple[Kernel, "KernelCase"], bool] = {}


class KernelCase(NamedTuple):
    """The kind of inputs that a kernel is tried for."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    is_masked: bool


def is_trusted(kernel: Kernel, case: KernelCase) -> bool:
    """Return whether ``kernel`` runs on inputs like ``case`` and agrees with `attend_plainly`; it is tried once.

    While a CUDA graph is captured nothing is tried, and only what was tried before is trusted.
    """
    known = _trusted.get((kernel, case))
    if known is not None:
        return known
    if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    with _lock:
        if (kernel, case) not in _trusted:
            _note(kernel, case, _what_is_wrong(kernel, case))
        return _trusted[kernel, case]


def distrust(kernel: Kernel, case: KernelCase, reason: str) -> None:
    """Do not use ``kernel`` again for inputs like ``case``."""
    with _lock:
        _note(kernel, case, reason)


def _note(kernel: Kernel, case: KernelCase, reason: str) -> None:
    _trusted[kernel, case] = not reason
    if reason:
        name = getattr(kernel, "__name__", str(kernel))
        _logger.info("%s is not used for %s: %s", name, case, reason)


@torch.no_grad()
def _what_is_wrong(kernel: Kernel, case: KernelCase) -> str:
    """Return what is wrong with ``kernel`` in words; empty where nothing is."""
    for size in _SIZES:
        for hidden in (torch.finfo(case.dtype).min, float("-inf")) if case.is_masked else (None,):
            query, keys, values, mask = _inputs(case, size, hidden)
            scale = 1.5 * case.head_dim**-0.5  # not the default
            try:
                found = kernel(query, keys, values, mask, scale)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return f"it raises {type(error).__name__}: {error}"
            exact = attend_plainly(query.double(), keys.double(), values.double(), mask, scale)
            reason = _difference(found, exact, case.dtype)
            if reason:
                return reason
    return ""


def _inputs(
    case: KernelCase, size: tuple[int, int, int, int], hidden: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return random inputs, laid out as those of a cache; where keys are ``hidden``, one query of several sees none.

    The numbers come from a generator of their own: sampling goes on as if nothing had been tried.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(case.device, case.dtype)

    rows, heads, queries, tokens = size
    query = random(rows, queries, heads, case.head_dim).transpose(1, 2)
    keys, values = (random(rows, heads, tokens + 3, dim)[:, :, :tokens] for dim in (case.head_dim, case.value_dim))
    if hidden is None:
        return query, keys, values, None
    is_hidden = random(rows, 1, queries, tokens) > 0.5
    if queries > 1:
        is_hidden[-1, :, -1] = True
    mask = torch.zeros(is_hidden.shape, dtype=case.dtype, device=case.device).masked_fill(is_hidden, hidden)
    return query, keys, values, mask


def _difference(
    found: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> str:
    for name, result, expected, tolerance in zip(
        ("output", "log-sum-exp"), found, exact, _TOLERANCES[dtype], strict=True
    ):
        if result.shape != expected.shape:
            return f"its {name} has shape {tuple(result.shape)}, not {tuple(expected.shape)}"
        if not result.isfinite().all():
            return f"its {name} is not finite"
        if name == "output":
            # Of a query that sees nothing any output will do, since it counts for nothing.
            off = (result - expected)[exact[1] > _HIDDEN]
        else:
            off = result.double().clamp_min(_HIDDEN) - expected.clamp_min(_HIDDEN)
        error = float(off.abs().max()) if off.numel() else 0.0
        if not error <= tolerance:
            return f"its {name} is off by {error:.2g}"
    return ""
