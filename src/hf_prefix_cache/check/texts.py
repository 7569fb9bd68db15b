"""What is fed: random texts, and where they are cut into prefix and suffix."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..compat import convolution_widths, decoder_config, original_max_positions
from ..exceptions import CacheCapacityError, InvalidTokensError
from ..scoring.model_access import length_limit
from ..scoring.self_check import length_thresholds
from ..validation import vocabulary_size

__all__ = ["QUANTIZED_OPTIONS", "SUFFIXES", "Texts", "plan_texts", "special_tokens"]

SUFFIXES = (1, 2, 7)
QUANTIZED_OPTIONS: dict[str, Any] = {"group_size": 32, "residual_length": 32}
"""The smallest groups, so that a short prefix is quantized."""
_QUANTIZED_SPLIT = 76  # at least one group behind the exact first tokens and before the residual
_ROOM = 12  # tokens behind a prefix at most: a suffix, a second one and a few more


@dataclass(frozen=True)
class Texts:
    """The texts of one check.

    Attributes:
        prefix: The longest prefix; shorter ones are its beginnings.
        streams: Three texts that suffixes are taken from.
        splits: Lengths of prefixes, ascending.
        quantized_splits: The same for quantized caches.
        other_splits: The same for the other strategies, which hold what the first one holds in other ways.
        suffixes: Lengths of suffixes, ascending.
        not_reached: Thresholds of the model beyond the longest text.
        regime: The length past which rotary frequencies change, or None.
    """

    prefix: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]
    quantized_splits: tuple[int, ...]
    other_splits: tuple[int, ...]
    suffixes: tuple[int, ...]
    not_reached: tuple[int, ...]
    regime: int | None

    def crosses_regime(self, split: int) -> bool:
        """Return whether keys of a prefix of ``split`` tokens are wrong with a suffix behind it."""
        return self.regime is not None and split + _ROOM > self.regime


def plan_texts(model: Any, *, input_ids: Sequence[int] | None, max_tokens: int, thorough: bool) -> Texts:
    """Choose texts and split points: before, at and beyond each length at which the model works differently.

    Args:
        model: The model.
        input_ids: A text to take prefixes from; random tokens by default.
        max_tokens: Tokens of a prefix at most.
        thorough: Whether to look on each side of every threshold, and not at a few points only.

    Raises:
        CacheCapacityError: ``max_tokens``, or what the model can read, leaves no room for a prefix.
        InvalidTokensError: ``input_ids`` is too short, or not in the vocabulary.
    """
    limit = length_limit(model.config)
    most = max_tokens if limit is None else min(max_tokens, limit - _ROOM)
    if input_ids is not None:
        most = min(most, len(input_ids))
    if most < 2:
        raise CacheCapacityError(
            f"prefixes may have {most} tokens at most; pass max_tokens of at least 2, and a text as long, for a model "
            f"that can read {_ROOM} tokens more"
        )
    thresholds = length_thresholds(model)
    reached = [threshold for threshold in thresholds if threshold < most]
    if thorough:
        wanted = {5, 33}.union(*({threshold - 1, threshold, threshold + 5} for threshold in reached))
    else:
        wanted = {7, max([24, *(threshold + 3 for threshold in reached)])}
    if thorough:
        for width in convolution_widths(model.config):
            wanted |= {width - 1, width, width + 1}
    splits = tuple(sorted({min(max(2, split), most) for split in wanted}))
    others = splits if thorough else splits[-1:]
    quantized = tuple(sorted({*others[:-1], min(_QUANTIZED_SPLIT, most)}))
    vocabulary = vocabulary_size(model)
    longest = max(*splits, *quantized)
    drawn = _random_tokens(model, vocabulary)
    if input_ids is None:
        prefix = tuple(next(drawn) for _ in range(longest))
    else:
        prefix = tuple(int(token) for token in input_ids[:longest])
        bad = next((token for token in prefix if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise InvalidTokensError(f"input_ids holds {bad}; token ids must be from 0 to {vocabulary - 1}")
    streams = tuple(tuple(next(drawn) for _ in range(_ROOM)) for _ in range(3))
    regime = original_max_positions(model.config)
    not_reached = tuple(threshold for threshold in thresholds if threshold >= most)
    return Texts(prefix, streams, splits, quantized, others, SUFFIXES, not_reached, regime)


def _random_tokens(model: Any, vocabulary: int) -> Iterator[int]:
    """Yield ordinary tokens: none that the configuration gives a meaning, such as a place for an image."""
    special = special_tokens(model)
    rng = random.Random(0)
    most = min(vocabulary, decoder_config(model.config).vocab_size)
    while True:
        token = rng.randrange(most)
        if token not in special:
            yield token


def special_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that the configuration of ``model`` gives a meaning, and 0, which pads rows here."""
    return frozenset({0, *_special_tokens(model.config.to_dict())})


def _special_tokens(settings: dict[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _special_tokens(value)
        elif "token" in str(name):
            yield from (entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, int))
