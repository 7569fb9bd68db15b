"""Checks of what users pass in, with errors that name the argument, the rule, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from .compat import decoder_config
from .exceptions import InputMismatchError, InvalidTokensError, UnknownStrategyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["STRATEGIES", "check_mask", "check_strategy", "check_token_ids", "vocabulary_size"]

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded", "prefix-auto")
"""The names of all strategies, one vocabulary everywhere."""


def check_strategy(strategy: str, *, available: Sequence[str] = STRATEGIES) -> str:
    """Return ``strategy`` if it is one of ``available``.

    Raises:
        UnknownStrategyError: It is not.
    """
    if strategy not in available:
        raise UnknownStrategyError(f"strategy is {strategy!r}; the strategies are {', '.join(available)}")
    return strategy


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that the input embeddings of ``model`` know."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.shape[0]


def check_token_ids(
    input_ids: torch.Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    name: str = "input_ids",
    vocabulary: int | None = None,
    config: PreTrainedConfig | None = None,
) -> torch.Tensor:
    """Return ``input_ids`` as an int64 tensor ``[rows, tokens]``.

    Args:
        input_ids: Token ids, ``[tokens]`` or ``[rows, tokens]``; a tensor or nested lists of ints.
        name: How errors call the argument.
        vocabulary: Number of ids that exist; None where it is not known.
        config: Configuration whose vocabulary size serves where ``vocabulary`` is None.

    Raises:
        InvalidTokensError: Empty, not integers, of another shape, or out of the vocabulary.
    """
    if not isinstance(input_ids, torch.Tensor):
        try:
            input_ids = torch.tensor(input_ids)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidTokensError(f"{name} must be a tensor or (nested, even) lists of ints: {error}") from error
    if input_ids.ndim == 1:
        input_ids = input_ids[None]
    if input_ids.ndim != 2 or not input_ids.numel():
        raise InvalidTokensError(
            f"{name} has shape {list(input_ids.shape)}; it must hold at least one token, as [tokens] or [rows, tokens]"
        )
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise InvalidTokensError(f"{name} has dtype {input_ids.dtype}; token ids are integers")
    if vocabulary is None and config is not None:
        vocabulary = getattr(decoder_config(config), "vocab_size", None)
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        limit = "" if vocabulary is None else f" and below {vocabulary}, the model's vocabulary size"
        raise InvalidTokensError(f"{name} holds the id {lowest if lowest < 0 else highest}; ids are 0 or more{limit}")
    return input_ids.to(torch.int64)


def check_mask(attention_mask: torch.Tensor, *, rows: int, cached: int, new: int) -> torch.Tensor:
    """Return ``attention_mask`` as bool ``[rows, cached + new]``; a mask over the new tokens alone is completed.

    Raises:
        InputMismatchError: It has another shape, or other values than 0 and 1.
    """
    mask = torch.as_tensor(attention_mask)
    if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] not in (new, cached + new):
        raise InputMismatchError(
            f"attention_mask has shape {list(mask.shape)}; with {cached} cached and {new} new tokens it must be "
            f"[{rows}, {cached + new}], or [{rows}, {new}] for the new tokens alone"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputMismatchError("attention_mask must hold 0 (padding) and 1 (token) only; additive masks do not fit")
    mask = mask.bool()
    if mask.shape[1] == new and cached:
        mask = torch.cat([mask.new_ones(rows, cached), mask], dim=1)
    return mask
