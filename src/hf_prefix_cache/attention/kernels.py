"""Attention that also returns the log-sum-exp of its scores, so that parts of it can be merged."""

import torch

__all__ = ["attend", "merge", "merge_last"]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys that ``mask`` lets through.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        keys: ``[batch, heads, tokens, head_dim]``.
        values: ``[batch, heads, tokens, value_dim]``.
        mask: Additive, broadcastable to ``[batch, heads, queries, tokens]``, in the dtype of ``query``; None lets
            everything through.
        scale: Factor on the scores.

    Returns:
        The output ``[batch, heads, queries, value_dim]`` and the log-sum-exp of the scores, float32
        ``[batch, heads, queries]``.
    """
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        if mask is not None:
            mask = mask.expand(query.shape[0], -1, -1, -1)
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output, log_sum
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum[..., None]).to(values.dtype)
    return torch.matmul(weights, values), log_sum


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
