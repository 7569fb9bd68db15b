"""``generate`` on a prefix cache that the caller passes, with complete prompts or with new tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..caches import PrefixCache
from ..compat import original_max_positions
from ..exceptions import InputMismatchError, UnsupportedModelError
from ..forward import has_running_state
from ..report import GenerationReport, record_report
from .batch import positions_of
from .call import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["continue_own_cache", "remember_ids", "tell_padding"]


def continue_own_cache(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    call: Call,
) -> bool:
    """Make what ``generate`` was given fit the cache that the caller passed.

    Transformers takes ids as complete if the mask is as long as they are, and returns wrong tokens if the cache holds
    the whole prompt already. Here the tokens that the cache knows decide: ids that begin as the cache does are
    complete, and fed again from the last one on if all of them are cached; ids that begin otherwise are new tokens.

    Args:
        model: The model.
        input_ids: The ids passed, ``[rows, tokens]``; empty with ``inputs_embeds``.
        generation_config: The call's.
        model_kwargs: What ``generate`` passes to the model; mask, positions and embeddings are completed in place.
        call: The call, which holds the cache.

    Returns:
        Whether the ids are complete prompts; otherwise they are all new.

    Raises:
        InputMismatchError: It cannot be told which of the two was passed, or the mask fits neither.
        BatchSizeError: The cache holds another number of rows.
        CacheCapacityError: A static cache has no room for the prompt and the tokens to generate.
        NotCroppableError: The prompt is cached whole, and a window has moved on.
        UnsupportedModelError: New tokens alone cross the length where the model's rotary scaling changes.
    """
    cache = call.cache
    if cache is None:
        return True
    embeds = model_kwargs.get("inputs_embeds")
    rows, new = input_ids.shape if embeds is None else embeds.shape[:2]
    for layer in cache.layers:
        layer.check_rows(rows)
    _check_whole(cache)
    held, mask = cache.seq_length, model_kwargs.get("attention_mask")
    covered = mask.shape[1] if mask is not None else (getattr(generation_config, "_mask_length", None) or new)
    if covered not in (new, held + new):
        raise InputMismatchError(
            f"attention_mask has {covered} columns; with {held} cached tokens and {new} passed ones it must have "
            f"{new} for complete prompts, or {held + new} for new tokens"
        )
    is_complete = not held or (covered == new and (embeds is not None or _begins_as(cache, input_ids, mask)))
    total = new if is_complete else held + new
    to_generate = (generation_config.max_length or input_ids.shape[1]) - input_ids.shape[1] - 1
    reason = _why_anew(model, cache, total, total + to_generate, is_complete=is_complete)
    known = cache.known_ids
    # What the cache was not told, such as the tokens of a call that was interrupted, is fed again.
    trusted = held if known is None or embeds is not None or not is_complete else known.shape[1]
    kept = 0 if reason else min(trusted, total - 1)
    if is_complete and kept == held - 1 and has_running_state(cache) and not cache.can_crop_to(kept):
        kept, reason = 0, "the cache holds the whole prompt, and its running state cannot go back by one token"
    for layer in cache.layers:
        layer.check_room(total + to_generate - held)
    full_mask = _full_mask(cache, mask, (rows, kept, covered, total), input_ids.device)
    if is_complete:
        known = torch.empty(1, 0, dtype=torch.long)
    if reason:
        cache.reset()
    elif kept < held:
        cache.crop_to(kept)
    # From here on the call goes ahead.
    call.known_before = known if known is not None and known.shape[1] == total - new else None
    if full_mask is not None:
        call.moved = full_mask if is_complete else None
        model_kwargs["attention_mask"] = full_mask
        if model_kwargs.get("position_ids") is not None:
            model_kwargs["position_ids"] = positions_of(full_mask)
    if embeds is not None and not is_complete:
        # Transformers takes embeddings as complete and drops as many as tokens are cached.
        model_kwargs["inputs_embeds"] = torch.cat([embeds.new_zeros(rows, held, embeds.shape[-1]), embeds], dim=1)
    record_report(model, GenerationReport(cache.strategy, rows, rows * total, rows * (total - kept), kept, reason))
    return is_complete


def tell_padding(cache: PrefixCache, mask: torch.Tensor | None) -> None:
    """Let ``cache`` know which columns of ``mask`` ``[rows, columns]``, cached and about to be, are padding."""
    if mask is not None and mask.ndim == 2:
        cache._padding = None if bool(mask.all()) else mask.bool()


def remember_ids(sequences: torch.Tensor, call: Call) -> None:
    """Let the call's cache know the tokens it holds, so that it can be passed back.

    Args:
        sequences: Prompts and generated tokens, ``[rows, columns]``.
        call: The call that has just ended.
    """
    cache, before, ids = call.cache, call.known_before, sequences.cpu()
    if cache is None:
        return
    if before is None or not call.rows_continue or cache.rows != len(ids):
        cache.known_ids = None
        return
    if call.moved is not None:
        # The cache has the padding elsewhere.
        places = torch.ones(ids.shape, dtype=torch.bool)
        places[:, : call.moved.shape[1]] = call.moved.bool().cpu()
        tokens = [row[int((~place).sum()) :] for row, place in zip(ids, places, strict=True)]
        ids = torch.zeros_like(ids).masked_scatter(places, torch.cat(tokens))
    cache.known_ids = torch.cat([before.expand(len(ids), -1), ids], dim=1)


def _check_whole(cache: PrefixCache) -> None:
    """Raise `InputMismatchError` if a forward has failed half-way, so that some layers hold its tokens."""
    lengths = sorted({layer.seen() for layer in cache.layers})
    if len(lengths) > 1:
        raise InputMismatchError(
            f"the layers of the cache hold {lengths[0]} to {lengths[-1]} tokens, since a forward on it has failed; "
            f"call cache.crop_to({lengths[0]}), or restore a snapshot"
        )


def _begins_as(cache: PrefixCache, input_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether ``input_ids`` are prompts that begin as the cache does, and not new tokens."""
    held, (rows, new), known = cache.seq_length, input_ids.shape, cache.known_ids
    remedy = f"pass attention_mask of shape [{rows}, {held + new}] if they are new tokens"
    if known is None:
        if new < held:
            raise InputMismatchError(
                f"the cache holds {held} tokens but was not told which, and input_ids has {new}; {remedy}, or crop "
                "the cache if they are a prompt that it holds"
            )
        return True
    agreements = []
    for row, passed in enumerate(input_ids.cpu()):
        tokens = known[row if known.shape[0] > 1 else 0]
        if cache.padding_mask is not None:
            tokens = tokens[cache.padding_mask[row, : len(tokens)].cpu()]
        if mask is not None:
            passed = passed[mask[row].bool().cpu()]
        length = min(len(tokens), len(passed))
        different = (tokens[:length] != passed[:length]).nonzero()
        agreements.append((int(different[0]) if len(different) else length, length))
    if all(agreed == length for agreed, length in agreements):
        return True
    if any(agreed == 0 for agreed, _ in agreements) and not any(agreed == length for agreed, length in agreements):
        return False
    row = next(index for index, (agreed, length) in enumerate(agreements) if agreed < length)
    shortest = min(agreed for agreed, _ in agreements)
    raise InputMismatchError(
        f"input_ids begins as the tokens in the cache do, but row {row} differs from token {agreements[row][0]} on; "
        f"{remedy}, or call cache.crop_to({shortest}) first if they are complete prompts"
    )


def _why_anew(model: PreTrainedModel, cache: PrefixCache, total: int, reached: int, *, is_complete: bool) -> str:
    """Return why what is cached must be computed again, or an empty string.

    Args:
        model: The model.
        cache: The cache.
        total: Columns of the prompts, cached ones included.
        reached: Columns that the call can come to.
        is_complete: Whether complete prompts were passed.
    """
    limit, held = original_max_positions(model.config), cache.seq_length
    if limit is None or not held or max(held, reached) <= limit:
        return ""
    if not is_complete:
        raise UnsupportedModelError(
            f"{held} cached and {total - held} new tokens can grow to {reached} in this call, but the rotary scaling "
            f"of {type(model).__name__} changes at {limit}, where the cached ones become wrong; pass complete "
            "prompts, which are then computed anew, or a smaller max_new_tokens"
        )
    # Some models compute all columns again once an answer crosses the limit: then padding must be where it was passed.
    if max(held, total) <= limit and cache.padding_mask is None:
        return ""
    return f"rows can grow beyond {limit} tokens, where the model's rotary scaling changes"


def _full_mask(
    cache: PrefixCache, mask: torch.Tensor | None, sizes: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Return the mask of all columns, int64 ``[rows, total]``, where what Transformers has made of it is not right.

    Args:
        cache: The cache.
        mask: What Transformers has; None for ones.
        sizes: Rows, columns of the cache that stay, columns of the mask, and all columns.
        device: Of the result where there is no mask.
    """
    rows, kept, covered, total = sizes
    known = cache.padding_mask
    if known is None and covered == total:
        return None
    mask = torch.ones(rows, covered, dtype=torch.long, device=device) if mask is None else mask.long()
    if covered < total:
        mask = torch.cat([mask.new_ones(rows, kept), mask], dim=1)
    if known is None:
        return mask
    held = known[:, :kept].to(mask)
    if covered == total and not torch.equal(held.sum(1), mask[:, :kept].sum(1)):
        raise InputMismatchError(
            "attention_mask and the cache do not agree on how much of each row is padding; pass the prompts with the "
            "padding that they had when they were cached"
        )
    return torch.cat([held, mask[:, kept:]], dim=1)
