"""Attention that also returns the log-sum-exp of its scores, so that parts of it can be merged."""

from collections.abc import Sequence

import torch

from .kernels_cuda import attend_fused
from .plain import attend_plainly

__all__ = ["attend", "merge"]


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


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Each part is an output ``[..., value_dim]`` and its log-sum-exp ``[...]``. The method is that of Hydragen
    (Juravsky et al., 2024) and of FlashInfer's cascade attention. More parts than two are added up in the dtype of
    the log-sum-exps.
    """
    (first, first_sum), *others = parts
    if not others:
        return first
    if len(others) == 1:
        ((second, second_sum),) = others
        return torch.lerp(first, second, torch.sigmoid(second_sum - first_sum)[..., None].to(first.dtype))
    weights = torch.stack([log_sum for _, log_sum in parts]).softmax(0)[..., None].unbind(0)
    merged = first * weights[0]
    for (output, _), weight in zip(others, weights[1:], strict=True):
        merged = merged.addcmul_(output, weight)
    return merged.to(first.dtype)
