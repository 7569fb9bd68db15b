"""PyTorch's fused kernels on CUDA devices, which hold no scores, called for their log-sum-exp.

What a kernel demands is checked before each call, since some of it is checked nowhere else: flash attention reads 16
bytes at a time, and a wrong address ends the process's use of the device. What a kernel returns is checked once, at
its first use (`kernel_trial`).
"""

from collections.abc import Iterator

import torch

from .kernel_trial import Kernel, KernelCase, distrust, is_trusted

__all__ = ["attend_efficiently", "attend_flash", "attend_fused"]

_MOST_BLOCKS = 2**16 - 1  # of a launch, in the dimensions that rows and heads take
_MOST_FLASH_DIM = 256
_BIAS_STEP = 8  # elements that the strides of a mask are multiples of
_HIDDEN = -1e30  # far below any score, and finite in the base-2 logarithms that the kernel takes


def attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend by a fused kernel, with the arguments and results of `kernels.attend`; None where none is fit.

    A kernel that refuses inputs in spite of its trial is not used again for inputs of their kind.
    """
    case = KernelCase(query.device, query.dtype, query.shape[-1], values.shape[-1], mask is not None)
    for kernel in _candidates(query, keys, values, mask):
        if not is_trusted(kernel, case):
            continue
        try:
            return kernel(query, keys, values, mask, scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            distrust(kernel, case, str(error))
    return None


def attend_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by flash attention, for float16 and bfloat16; it knows no mask."""
    if mask is not None:
        raise TypeError("flash attention takes no mask")
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, False, False, scale=scale
    )
    return output, log_sum.narrow(-1, 0, query.shape[2])


def attend_efficiently(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by memory-efficient attention, which takes a mask, float32, and values of another size."""
    bias = None if mask is None else _bias(mask, query, keys)
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, False, scale=scale
    )
    # It comes for a multiple of 32 queries.
    return output, log_sum.narrow(-1, 0, query.shape[2])


def _candidates(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> Iterator[Kernel]:
    """Yield the kernels that these inputs fit and that the user has not switched off, fastest first."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if not is_half and query.dtype != torch.float32:
        return
    parts = (query, keys, values) if mask is None else (query, keys, values, mask)
    if any(part.dtype != query.dtype or part.dim() != 4 or not part.numel() for part in parts):
        return
    if max(query.shape[:2]) > _MOST_BLOCKS or not all(_is_aligned(part) for part in (query, keys, values)):
        return
    head_dim, value_dim = query.shape[-1], values.shape[-1]
    fits_flash = is_half and mask is None and head_dim == value_dim <= _MOST_FLASH_DIM
    if fits_flash and torch.backends.cuda.flash_sdp_enabled():
        yield attend_flash
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        yield attend_efficiently


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether each vector of the last dimension begins at and takes a multiple of 16 bytes."""
    step = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    return (
        last == 1
        and tensor.shape[-1] % step == 0
        and all(stride % step == 0 for stride in strides)
        and tensor.data_ptr() % 16 == 0
    )


def _bias(mask: torch.Tensor, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return ``mask`` as the kernel takes it: aligned, of every row and head, and with finite numbers only.

    Where all keys of a query have the lowest number or minus infinity, the kernel would return no number.
    """
    tokens = mask.shape[-1]
    finite = mask.clamp_min(max(_HIDDEN, torch.finfo(mask.dtype).min))
    # Storage of its own, so that it begins aligned, with rows that do.
    padded = torch.nn.functional.pad(finite, (0, _BIAS_STEP - tokens % _BIAS_STEP))
    return padded.narrow(-1, 0, tokens).expand(*query.shape[:3], keys.shape[2])
