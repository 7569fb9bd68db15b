"""Attention that also returns the log-sum-exp of its scores, so that parts of it can be merged."""

import torch

from .kernels_cuda import attend_fused
from .plain import attend_plainly

__all__ = ["attend", "merge", "merge_last"]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys that ``mask`` lets through.

    A fused kernel of PyTorch does it where there is one: on a CPU, and on CUDA devices if it passes its trial. Else,
    with gradients, and while torch.compile traces, it is `attend_plainly`. So it is while a CUDA graph is captured,
    for inputs of a kind that was not met before.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        keys: ``[batch, heads, tokens, head_dim]``.
        values: ``[batch, heads, tokens, value_dim]``.
        mask: Additive, broadcastable to ``[batch, heads, queries, tokens]``, in the dtype of ``query``; None lets
            everything through. A query that sees no key has the lowest number for each, not minus infinity, with which
            the kernel for CPUs returns a log-sum-exp of 0.
        scale: Factor on the scores.

    Returns:
        The output ``[batch, heads, queries, value_dim]`` and the log-sum-exp of the scores, float32
        ``[batch, heads, queries]``.
    """
    # No fused kernel passes gradients on through the log-sum-exp.
    needs_gradients = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad)
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1] and not needs_gradients:
        if mask is not None:
            mask = mask.expand(query.shape[0], -1, -1, -1)
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output, log_sum
    if query.device.type == "cuda" and not needs_gradients and not torch.compiler.is_compiling():
        result = attend_fused(query, keys, values, mask, scale)
        if result is not None:
            return result
    return attend_plainly(query, keys, values, mask, scale)


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over both.

    Each part is an output ``[..., value_dim]`` and its log-sum-exp ``[...]``. The method is that of Hydragen
    (Juravsky et al., 2024) and of FlashInfer's cascade attention.
    """
    return merge_last(first, second), torch.logaddexp(first[1], second[1])


def merge_last(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the output alone of what `merge` merges, where nothing is merged with it any more."""
    (left, left_sum), (right, right_sum) = first, second
    weight = torch.sigmoid(right_sum - left_sum)[..., None].to(left.dtype)
    return torch.lerp(left, right, weight)
