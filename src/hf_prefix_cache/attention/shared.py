"""Attention of a batch over a prefix that its rows share, and over each row's own tokens."""

import torch

from ..layers.state import KeyValues
from .kernels import attend, merge

__all__ = ["reference_attention", "shared_prefix_attention"]


def shared_prefix_attention(
    query: torch.Tensor,
    shared: tuple[KeyValues, ...],
    own: KeyValues,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend to the shared segments once for all rows, and to own tokens row by row; merge by log-sum-exp.

    Rows, and the query heads that share a key head, are folded into the query length: the shared keys are read once,
    and never repeated. Any number of shared segments may be nested (system prompt, then document).

    Args:
        query: ``[rows, heads, queries, head_dim]``; ``heads`` is a multiple of the keys' heads.
        shared: Segments that every query sees whole: keys and values ``[1 or rows, key_heads, tokens, head_dim]``.
        own: Each row's own keys and values, ``[rows, key_heads, own_tokens, head_dim]``.
        mask: Additive mask over own tokens, ``[1 or rows, 1, queries, own_tokens]`` in the dtype of ``query``; None
            lets everything through.
        scale: Factor on the scores.

    Returns:
        The output, ``[rows, heads, queries, value_dim]``.
    """
    rows, heads, queries, head_dim = query.shape
    key_heads = own.keys.shape[1]
    group = heads // key_heads
    by_row = query.reshape(rows, key_heads, group * queries, head_dim)
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    parts = [attend(by_row, own.keys, own.values, mask, scale)]
    for segment in shared:
        if segment.rows == rows:
            parts.append(attend(by_row, segment.keys, segment.values, None, scale))
            continue
        folded = by_row.transpose(0, 1).reshape(1, key_heads, rows * group * queries, head_dim)
        output, log_sum = attend(folded, segment.keys, segment.values, None, scale)
        output = output.reshape(key_heads, rows, group * queries, -1).transpose(0, 1)
        parts.append((output, log_sum.reshape(key_heads, rows, group * queries).transpose(0, 1)))
    return merge(parts).reshape(rows, heads, queries, -1)


def reference_attention(
    query: torch.Tensor,
    shared: tuple[KeyValues, ...],
    own: KeyValues,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute what `shared_prefix_attention` computes, slowly, in float64: it defines what is correct."""
    rows, group = query.shape[0], query.shape[1] // own.keys.shape[1]
    segments = [*shared, own]
    keys = torch.cat([part.keys.expand(rows, -1, -1, -1) for part in segments], dim=-2).double()
    values = torch.cat([part.values.expand(rows, -1, -1, -1) for part in segments], dim=-2).double()
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.matmul(query.double(), keys.transpose(-1, -2)) * scale
    if mask is not None:
        scores[..., -own.tokens :] += mask.double()
    return torch.matmul(scores.softmax(dim=-1), values)
