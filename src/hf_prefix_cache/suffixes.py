"""Suffixes behind one prefix: one padded batch, or, where padding is not exact, one forward for each length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .architectures import positions_follow_mask
from .compat import cache_argument, forget_rotary_state, original_max_positions
from .exceptions import InputMismatchError, LossyPrefixError, SnapshotIncompleteError, UnsupportedModelError
from .forward import cache_behind, check_keeps_cache, has_running_state, takes_single_tokens
from .layers import KeptState
from .report import GenerationReport
from .sharing import attending
from .snapshot import PrefixSnapshot
from .trial import try_own_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GroupedOutput", "SuffixOutput", "crosses_regime", "forward_behind", "forward_grouped"]


class GroupedOutput(NamedTuple):
    """What grouped forwards gave.

    Attributes:
        output: The model's output with ``logits`` ``[rows, tokens, vocab]``, 0 at padding, and nothing else.
        computed_tokens: Tokens fed to the model.
    """

    output: Any
    computed_tokens: int


class SuffixOutput(NamedTuple):
    """What a forward behind a prefix gave.

    Attributes:
        output: The model's output.
        report: What was asked for, reused and computed.
    """

    output: Any
    report: GenerationReport


def forward_behind(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    prefix: PrefixSnapshot,
    *,
    strategy: str,
    options: dict[str, Any],
    **kwargs: Any,
) -> SuffixOutput:
    """Run suffixes behind ``prefix``, in one forward where that is exact; see `PrefixCachedModel.forward`.

    Args:
        model: The model.
        input_ids: The suffixes, ``[rows, tokens]``, padded on either side.
        mask: True at tokens, bool ``[rows, tokens]``.
        prefix: The prefix, of one row.
        strategy: Cache strategy, ``prefix-auto`` included.
        options: Options of its cache where it is ``prefix-quantized``.
        **kwargs: Passed on to the model.

    Raises:
        InputMismatchError: A row without any token.
        LossyPrefixError: The prefix is lossy and of another strategy.
        SnapshotIncompleteError, UnsupportedModelError: As `forward_grouped`, for activation checkpointing, and where
            a class of the user's own is wrong behind a prefix.
    """
    check_keeps_cache(model)
    forget_rotary_state(model)
    if not bool(mask.any(1).all()):
        empty = int((~mask.any(1)).nonzero()[0])
        raise InputMismatchError(f"attention_mask leaves row {empty} without any token; leave that row out")
    if prefix.is_lossy and prefix.strategy != strategy:
        raise LossyPrefixError(
            f"prefix is lossy, filled by {prefix.strategy!r}, and strategy is {strategy!r}; make the wrapper with "
            f"strategy={prefix.strategy!r}, or pass an exact prefix"
        )
    if strategy == "prefix-auto":
        try_own_class(model)
        strategy = "prefix-dynamic"
    rows, new = input_ids.shape
    own_options: dict[str, Any] = {}
    if strategy == "prefix-static":
        own_options = {"max_cache_len": prefix.seq_length + new}
    elif strategy == "prefix-quantized":
        own_options = {"quantize_own": False, **options}
    reason = ""
    if crosses_regime(model, prefix, int(mask.sum(1).max())):
        reason = "rows are so long that the model's rotary scaling changes, and are computed whole"
    attends_fully = not has_running_state(prefix) and all(
        layer.window is None and not isinstance(layer, KeptState) for layer in prefix.layers
    )
    can_mask = attends_fully and positions_follow_mask(model.config)
    is_padded, computed = not bool(mask.all()), int(mask.sum())
    total = rows * prefix.seq_length + computed
    if reason or (is_padded and not can_mask) or takes_single_tokens(model, prefix):
        output, computed = forward_grouped(model, input_ids, mask, prefix, **kwargs)
    else:
        cache = prefix.to_cache(strategy, rows, **own_options)
        prepared = cache.prepare_inputs(input_ids, mask if is_padded else None)
        with attending(model, cache):
            output = model(**prepared._asdict(), **cache_argument(cache), **kwargs)
    return SuffixOutput(output, GenerationReport(strategy, rows, total, computed, prefix.seq_length, reason))


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
        UnsupportedModelError: A keyword asks for more than logits, or the prefix has padding.
        SnapshotIncompleteError: A row must be computed whole, and the prefix does not know its tokens.
    """
    refused = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if refused:
        raise UnsupportedModelError(
            f"these rows run in groups on {type(model).__name__}, which gives logits only; leave out "
            f"{', '.join(refused)}, or pass rows of equal length without padding, below any change of rotary scaling"
        )
    if prefix.padding_mask is not None:
        raise UnsupportedModelError(
            f"the prefix has padding, which rows that run in groups on {type(model).__name__} would take for tokens; "
            "pass a prefix that was computed without padding"
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
        with attending(model, cache):
            output = model(input_ids=chunk, return_dict=True, **cache_argument(cache))
        parts.append(output.logits)
    return output, torch.cat(parts, dim=1)


def _whole_rows(model: PreTrainedModel, prefix: PrefixSnapshot, group: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Run prefix and ``group`` without a cache, as a fresh model would; return the output and the group's logits."""
    forget_rotary_state(model)
    ids = torch.as_tensor(prefix.input_ids).to(group).expand(len(group), -1)
    output = model(input_ids=torch.cat([ids, group], dim=1), use_cache=False, return_dict=True)
    return output, output.logits[:, -group.shape[1] :]
