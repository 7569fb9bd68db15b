"""Attention with its log-sum-exp in plain tensor operations: what every kernel has to agree with."""

import torch

__all__ = ["attend_plainly"]

_MOST_BYTES = 2**28  # of scores at once, 256 MiB


def attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all keys that ``mask`` lets through, on any device and with gradients.

    It computes in float32, or float64 for such inputs, whatever autocast says, and in slices of rows and of queries,
    so that scores (and, of more rows than one, keys and values in float32) take 256 MiB at most at a time; only
    where gradients are needed, autograd holds all of them.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        keys: ``[batch, heads, tokens, head_dim]``.
        values: ``[batch, heads, tokens, value_dim]``.
        mask: Additive, broadcastable to ``[batch, heads, queries, tokens]``; None lets everything through.
        scale: Factor on the scores.

    Returns:
        The output ``[batch, heads, queries, value_dim]`` in the dtype of ``query``, and the log-sum-exp of the scores
        ``[batch, heads, queries]``. A query from which minus infinity hides every key has an output of 0 and the
        lowest number as log-sum-exp: merged with other keys it counts for nothing.
    """
    if torch.is_autocast_enabled(query.device.type):
        with torch.autocast(query.device.type, enabled=False):
            return attend_plainly(query, keys, values, mask, scale)
    rows, heads, queries, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    by_query = rows * heads * keys.shape[2] * dtype.itemsize
    converted = by_query * (head_dim + values.shape[3]) if keys.dtype != dtype else 0
    if rows > 1 and queries * by_query + converted > _MOST_BYTES:
        halves = (slice(0, rows // 2), slice(rows // 2, rows))
        parts = [attend_plainly(query[half], keys[half], values[half], _rows_of(mask, half), scale) for half in halves]
        return _joined(parts, 0)
    exact = query.to(dtype), keys.to(dtype), values.to(dtype)
    if queries * by_query <= _MOST_BYTES:
        output, log_sum = _attend(*exact, mask, scale)
    else:
        step = max(1, _MOST_BYTES // by_query)
        output, log_sum = _joined(
            [
                _attend(part, *exact[1:], _queries_of(mask, index * step, step), scale)
                for index, part in enumerate(exact[0].split(step, dim=2))
            ],
            2,
        )
    return output.to(query.dtype), log_sum


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, keys.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores.add_(mask)
    # Any number below the lowest one is minus infinity; less that, it would be no number at all.
    peak = scores.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = scores.sub_(peak).exp_()
    # At least 1, for the highest score, unless every key is hidden.
    total = weights.sum(dim=-1, keepdim=True).clamp_min(1)
    return torch.matmul(weights, values) / total, (total.log() + peak).squeeze(-1)


def _rows_of(mask: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return mask if mask is None or mask.dim() < 4 or mask.shape[0] == 1 else mask[rows]


def _queries_of(mask: torch.Tensor | None, start: int, step: int) -> torch.Tensor | None:
    return mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., start : start + step, :]


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]], dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, log_sums = zip(*parts, strict=True)
    return torch.cat(outputs, dim), torch.cat(log_sums, dim)
