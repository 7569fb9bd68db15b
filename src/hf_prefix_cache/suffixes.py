"""Suffixes behind one prefix where they cannot run as one padded batch: one forward for each length, unpadded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .compat import cache_argument, forget_rotary_state, original_max_positions
from .exceptions import SnapshotIncompleteError, UnsupportedModelError
from .forward import cache_behind, takes_single_tokens
from .snapshot import PrefixSnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GroupedOutput", "crosses_regime", "forward_grouped"]


class GroupedOutput(NamedTuple):
    """What grouped forwards gave.

    Attributes:
        output: The model's output with ``logits`` ``[rows, tokens, vocab]``, 0 at padding, and nothing else.
        computed_tokens: Tokens fed to the model.
    """

    output: Any
    computed_tokens: int


def crosses_regime(model: PreTrainedModel, prefix: PrefixSnapshot, suffix_length: int) -> bool:
    """Return whether the keys of ``prefix`` are wrong with that many tokens behind it: the rotary scaling changes."""
    limit = original_max_positions(model.config)
    return limit is not None and max(prefix.seq_length, prefix.seq_length + suffix_length) > limit


def forward_grouped(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, prefix: PrefixSnapshot, **kwargs: Any
) -> GroupedOutput:
    """Run rows unpadded behind ``prefix``, one forward for each length, and return one output for all.

    Rows that are so long that the model's rotary scaling changes are computed whole, prefix included.

    Args:
        model: The model.
        input_ids: Padded suffixes, ``[rows, tokens]``.
        mask: True at tokens, of which every row has one, bool ``[rows, tokens]``.
        prefix: The prefix, of one row.
        **kwargs: Passed on to the model.

    Raises:
        UnsupportedModelError: A keyword asks for more than logits.
        SnapshotIncompleteError: A row must be computed whole, and the prefix does not know its tokens.
    """
    refused = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if refused:
        raise UnsupportedModelError(
            f"these rows run in groups on {type(model).__name__}, which gives logits only; leave out "
            f"{', '.join(refused)}, or pass rows of equal length without padding, below any change of rotary scaling"
        )
    lengths = mask.sum(1)
    if prefix.input_ids is None and crosses_regime(model, prefix, int(lengths.max())):
        raise SnapshotIncompleteError(
            f"the rotary scaling of {type(model).__name__} changes at {original_max_positions(model.config)} tokens, "
            "and the prefix does not know its tokens to be computed anew; take it with prefill"
        )
    output: Any = None
    logits, computed = None, 0
    for length in sorted({int(value) for value in lengths}):
        rows = (lengths == length).nonzero()[:, 0]
        group = input_ids[rows][mask[rows]].reshape(len(rows), length)
        anew = crosses_regime(model, prefix, length)
        output, part = _whole_rows(model, prefix, group) if anew else _behind(model, prefix, group)
        computed += len(rows) * (length + (prefix.seq_length if anew else 0))
        if logits is None:
            logits = part.new_zeros(*input_ids.shape, part.shape[-1])
        where = torch.zeros_like(mask)
        where[rows] = mask[rows]
        logits[where] = part.reshape(-1, part.shape[-1])
    return GroupedOutput(type(output)(logits=logits), computed)


def _behind(model: PreTrainedModel, prefix: PrefixSnapshot, group: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Run ``group`` ``[rows, tokens]`` behind ``prefix``; return the last output and the logits of all tokens."""
    cache = cache_behind(prefix, len(group))
    size = 1 if takes_single_tokens(model, cache) else group.shape[1]
    parts = []
    for chunk in group.split(size, dim=1):
        output = model(input_ids=chunk, return_dict=True, **cache_argument(cache))
        parts.append(output.logits)
    return output, torch.cat(parts, dim=1)


def _whole_rows(model: PreTrainedModel, prefix: PrefixSnapshot, group: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Run prefix and ``group`` without a cache, as a fresh model would; return the output and the group's logits."""
    forget_rotary_state(model)
    ids = torch.as_tensor(prefix.input_ids).to(group).expand(len(group), -1)
    output = model(input_ids=torch.cat([ids, group], dim=1), use_cache=False, return_dict=True)
    return output, output.logits[:, -group.shape[1] :]
