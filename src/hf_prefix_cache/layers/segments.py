"""Runs of exact and quantized tokens, one after the other."""

from collections.abc import Sequence
from itertools import groupby

import torch

from ..quantization import Scheme
from .quantized_run import QuantizedRun, join_runs, quantize_run
from .state import KeyValues

__all__ = ["Segment", "Segments", "after_runs", "compact", "count_tokens", "due_groups", "exact", "has_graph"]
__all__ += ["join", "own_copy", "quantize", "runs_in", "split"]

Segment = KeyValues | QuantizedRun
Segments = tuple[Segment, ...]


def count_tokens(segments: Sequence[Segment]) -> int:
    """Return the tokens of all segments."""
    return sum(segment.tokens for segment in segments)


def runs_in(segments: Sequence[Segment]) -> list[QuantizedRun]:
    """Return the quantized ones among ``segments``."""
    return [segment for segment in segments if isinstance(segment, QuantizedRun)]


def split(segments: Sequence[Segment], tokens: int) -> tuple[Segments, Segments]:
    """Return ``segments`` before and from token ``tokens`` on; views."""
    before: list[Segment] = []
    after: list[Segment] = []
    for segment in segments:
        cut = min(max(0, tokens), segment.tokens)
        if cut:
            before.append(segment if cut == segment.tokens else segment.slice(0, cut))
        if cut < segment.tokens:
            after.append(segment.slice(cut, segment.tokens) if cut else segment)
        tokens -= segment.tokens
    return tuple(before), tuple(after)


def after_runs(segments: Sequence[Segment]) -> tuple[KeyValues, ...]:
    """Return the exact segments behind the last quantized one."""
    exact_ones: list[KeyValues] = []
    for segment in reversed(segments):
        if isinstance(segment, QuantizedRun):
            break
        exact_ones.insert(0, segment)
    return tuple(exact_ones)


def exact(segments: Sequence[Segment]) -> tuple[KeyValues, ...]:
    """Return ``segments`` with quantized ones decoded."""
    return tuple(segment.exact() if isinstance(segment, QuantizedRun) else segment for segment in segments)


def has_graph(segments: Sequence[Segment]) -> bool:
    """Return whether any exact segment is part of an autograd graph."""
    return any(part.requires_grad for segment in segments if isinstance(segment, KeyValues) for part in segment)


def join(segments: Sequence[KeyValues], rows: int) -> KeyValues:
    """Return exact segments as one pair of tensors with ``rows`` rows; views where there is one segment only."""
    if len(segments) == 1:
        return KeyValues(*(part.expand(rows, -1, -1, -1) for part in segments[0]))
    keys, values = (
        torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-2) for parts in zip(*segments, strict=True)
    )
    return KeyValues(keys, values)


def compact(segments: Sequence[Segment]) -> Segments:
    """Return ``segments`` in storage of their own without spare room, neighbours joined as far as they can be."""
    result: list[Segment] = []
    for key, group in groupby(segments, key=_joinable):
        if key == _EXACT:
            result.append(own_copy([part for part in group if isinstance(part, KeyValues)]))
        elif key == _WHOLE:
            result.append(join_runs([part for part in group if isinstance(part, QuantizedRun)]))
        else:
            result.extend(part.compact() for part in group if isinstance(part, QuantizedRun))
    return tuple(result)


def own_copy(segments: Sequence[KeyValues]) -> KeyValues:
    """Return exact segments as one pair of tensors in storage of its own."""
    joined = join(segments, max(segment.rows for segment in segments))
    return (
        KeyValues(*(part.clone(memory_format=torch.contiguous_format) for part in joined))
        if len(segments) == 1
        else joined
    )


def due_groups(tokens: int, first: int, scheme: Scheme) -> int:
    """Return how many groups of ``tokens`` exact tokens, of which the first is at position ``first``, are complete."""
    tokens -= _exact_first(first, scheme)
    surplus = tokens - scheme.residual_length
    return max(0, min(-(-surplus // scheme.group_tokens), tokens // scheme.group_tokens))


def quantize(segments: Segments, first: int, scheme: Scheme, longest: int | None = None) -> Segments:
    """Return ``segments`` with those tokens quantized that are exact, behind all quantized ones, and due.

    Args:
        segments: Runs of tokens in order.
        first: Position of their first token.
        scheme: How to quantize.
        longest: Tokens of a run at most, a multiple of a group; None for any number.
    """
    tail = after_runs(segments)
    before = segments[: len(segments) - len(tail)]
    first += count_tokens(before)
    groups = due_groups(count_tokens(tail), first, scheme)
    if not groups or has_graph(tail):
        return segments
    sink, rest = split(tail, _exact_first(first, scheme))
    due, rest = split(rest, groups * scheme.group_tokens)
    tokens = _exact_only(due)
    whole = join(tokens, max(part.rows for part in tokens))
    step = longest or whole.tokens
    runs = [quantize_run(scheme, whole.slice(at, min(at + step, whole.tokens))) for at in range(0, whole.tokens, step)]
    # What stays exact is copied, so that it does not keep the storage of all.
    kept = [(own_copy(_exact_only(part)),) if part else () for part in (sink, rest)]
    return (*before, *kept[0], *runs, *kept[1])


_EXACT, _WHOLE, _CUT = "exact", "whole", "cut"


def _joinable(segment: Segment) -> str:
    if isinstance(segment, KeyValues):
        return _EXACT
    return _WHOLE if segment.is_whole else _CUT


def _exact_first(first: int, scheme: Scheme) -> int:
    return max(0, scheme.exact_first - first)


def _exact_only(segments: Sequence[Segment]) -> list[KeyValues]:
    return [segment for segment in segments if isinstance(segment, KeyValues)]
