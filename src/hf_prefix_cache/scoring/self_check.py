"""The first-use self-check: a small sample by the fast route and by plain rows, before the fast route is trusted.

Both are judged as `check` judges: by the same oracle, on both sides of the same thresholds.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..compat import attention_implementation, decoder_config, layer_specs
from ..fingerprint import fingerprint_of
from ..oracle import Ids, Oracle
from ..tolerance import TOLERANCES, differences, judged_dtype
from .chunk_size import BatchLimits
from .model_access import innermost_model, input_device
from .probes import Probes
from .report import SelfCheck
from .requests import TokenRequests, pack_requests
from .rows import score_rows
from .tree import SortedRows, sort_rows

__all__ = ["check_route", "length_thresholds"]

_SHORT = 40  # tokens of the sample that no threshold asks for
_BRANCH = 8  # tokens of its branches, on either side of a threshold
_THRESHOLDS = (
    "sliding_window",
    "attention_chunk_size",
    "index_topk",
    "indexer_budget",
    "floor_scale",
    "original_max_position_embeddings",
)

# By model, by its state, by the thresholds that requests reach.
_checked: "weakref.WeakKeyDictionary[torch.nn.Module, dict[object, dict[tuple[int, ...], SelfCheck]]]" = (
    weakref.WeakKeyDictionary()
)

Scorer = Callable[[TokenRequests, SortedRows, Probes, int], None]


def length_thresholds(model: Any) -> tuple[int, ...]:
    """Return the lengths past which the model's configuration says it works differently, ascending."""
    # As a dictionary, since settings that differ between layers cannot be read as attributes.
    settings = decoder_config(model.config).to_dict()
    rotary = settings.get("rope_parameters") or {}
    parts = [settings, rotary, *(part for part in rotary.values() if isinstance(part, dict))]
    found = {part.get(name) for part in parts for name in _THRESHOLDS}
    found |= {spec.window for spec in layer_specs(model.config)}
    found |= set((settings.get("compress_rates") or {}).values())  # tokens that become one, by kind of layer
    found.add((settings.get("index_block_size") or 0) * (settings.get("index_topk_blocks") or 0))
    return tuple(sorted(int(value) for value in found if isinstance(value, (int, float)) and value > 1))


def check_route(model: Any, requests: TokenRequests, score: Scorer) -> SelfCheck:
    """Compare ``score`` with plain rows on a sample made of the requests' own tokens.

    Done once for each state of the weights, device, attention implementation and set of thresholds that the requests
    reach; later calls return what was found.

    Args:
        model: The model, in evaluation mode.
        requests: What is going to be scored.
        score: Scores a sample by the route in question, given a chunk size.

    Returns:
        What was found. An error raised by ``score`` is a failed check.
    """
    longest = int(requests.fed_lengths.max(initial=0))
    reached = tuple(length for length in length_thresholds(model) if longest > length)
    base = innermost_model(model)
    state = (
        fingerprint_of(base),
        str(input_device(model)),
        base.dtype,
        attention_implementation(decoder_config(model.config)),
        torch.is_autocast_enabled(input_device(model).type),
    )
    known = _checked.setdefault(base, {})
    if state not in known:
        known.clear()  # a model is in one state at a time
        known[state] = {}
    if reached not in known[state]:
        known[state][reached] = _compare(model, requests, reached, longest, score)
    return known[state][reached]


def _compare(model: Any, requests: TokenRequests, reached: tuple[int, ...], longest: int, score: Scorer) -> SelfCheck:
    oracle, tolerance = Oracle(model), TOLERANCES[judged_dtype(model)]
    lengths, largest, judged = [], 0.0, 0.0
    for length in (min(_SHORT, longest), *(min(threshold + _BRANCH, longest) for threshold in reached)):
        sample = _sample(requests, length)
        rows = sort_rows(sample)
        expected, found = (Probes.of(sample, rows, torch.float32) for _ in range(2))
        score_rows(
            model,
            sample,
            rows,
            expected,
            limits=BatchLimits(length, length, length),
            on_tokens=lambda _: None,
        )
        lengths.append(length)
        right = torch.from_numpy(expected.logprobs)
        try:
            # Chunks far smaller than the sample, so that paths are carried from one to the next.
            score(sample, rows, found, max(_SHORT // 2, length // 4))
            apart = differences(right, torch.from_numpy(found.logprobs))
            deviation, tolerance = oracle.judge_rows(apart, _split_rows(sample), largest=float(right.abs().max()))
        except Exception as error:
            return SelfCheck("failed", tuple(lengths), reason=f"{type(error).__name__}: {error}")
        largest, judged = max(largest, float(apart.max())), max(judged, deviation)
        if deviation > tolerance:
            reason = f"log-probabilities of rows of {length} tokens differ by {deviation:.2g}"
            return SelfCheck("failed", tuple(lengths), largest, judged, tolerance, reason)
    return SelfCheck("passed", tuple(lengths), largest, judged, tolerance)


def _split_rows(requests: TokenRequests) -> list[tuple[Ids, Ids]]:
    """Return each request as what comes before the first place that is scored, and what is fed from there on."""
    rows = []
    for begin, end, context in zip(requests.starts, requests.starts[1:], requests.context_lengths, strict=False):
        fed = tuple(requests.tokens[begin : end - 1].tolist())
        if len(fed) >= context:
            rows.append((fed[: context - 1], fed[context - 1 :]))
    return rows


def _sample(requests: TokenRequests, length: int) -> TokenRequests:
    """Make requests that branch at several depths; the longest reads ``length`` of the longest request's tokens."""
    source = int(np.argmax(requests.fed_lengths))
    start = int(requests.starts[source])
    row = requests.tokens[start : start + length + 1].tolist()
    branch = min(2 * _BRANCH, len(row) // 2)
    stem, leaf = row[: len(row) - branch], row[len(row) - branch :]
    half = len(leaf) // 2
    return pack_requests(
        [
            (stem, leaf),
            (stem, leaf[::-1]),
            (stem + leaf[:half], leaf[:half]),
            (stem[: len(stem) // 2 + 1], leaf[:half]),
        ]
    )
