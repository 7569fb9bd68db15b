"""The prefill of ``generate``: find what is known, compute what rows share once, leave the rest to Transformers."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..caches import PrefixCache, PrefixDynamicCache
from ..compat import CACHE_ARGUMENT, original_max_positions
from ..exceptions import InputMismatchError
from ..forward import feed
from ..report import GenerationReport, record_report
from ..snapshot import PrefixSnapshot
from ..store import store_for
from .batch import PromptBatch, common_prefix_length, moved_mask, positions_of, read_batch
from .call import Call, given_for

__all__ = ["continue_own_cache", "reuse_prefix"]

# A prefix that rows share is computed apart, at batch 1, if that saves at least this many tokens.
_WORTH_A_FORWARD = 32
# What `generate` passes to every forward of a text model. Other tensors (images, embeddings) decide numbers too.
_PLAIN_ARGUMENTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", CACHE_ARGUMENT})


def reuse_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    call: Call,
) -> None:
    """Put the call's cache at the longest known prefix of ``input_ids`` ``[rows, columns]``.

    Transformers then prefills what is left. ``model_kwargs`` gets the mask and positions that go with it.
    """
    cache = call.cache
    if cache is None:
        return
    batch = read_batch(input_ids, model_kwargs.get("attention_mask")) if input_ids.shape[1] else None
    reason = _why_afresh(model, batch, cache, model_kwargs, call)
    rows = input_ids.shape[0]
    if batch is None or reason:
        tokens = int(input_ids.numel()) if batch is None else batch.tokens
        call.rows_continue = call.rows_continue and batch is not None and not reason
        record_report(model, GenerationReport(call.strategy, rows, tokens, tokens, 0, reason))
        return
    call.padding = batch.padding
    common = min(common_prefix_length(batch.rows), batch.shortest - 1)
    known = _longest_known(model, batch.rows[0][:common], call) if common else None
    stored = 0 if known is None else known.seq_length
    computed = 0
    if rows > 1 and (rows - 1) * (common - stored) >= _WORTH_A_FORWARD:
        known = _compute(model, batch.rows[0][:common], known, call, generation_config.prefill_chunk_size)
        computed = common - stored
    if known is not None:
        cache.load(known, batch_size=rows)
        call.shared = known.seq_length
        if isinstance(cache, PrefixDynamicCache) and call.rows_continue:
            # Decoding would gather the shared prefix at every step. Beams keep it shared: they reorder rows at
            # every step, and what is shared needs no reordering.
            cache.unshare()
        if any(batch.padding):
            mask = moved_mask(batch, call.shared, input_ids.device)
            model_kwargs["attention_mask"], model_kwargs["position_ids"] = mask, positions_of(mask)
    computed += batch.tokens - rows * call.shared
    record_report(model, GenerationReport(call.strategy, rows, batch.tokens, computed, stored))


def continue_own_cache(
    input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], cache: PrefixCache
) -> None:
    """Make ``generate`` right on a prefix cache that the caller passes, with full ids or with the new ids alone.

    Transformers derives from the mask which of the two it got, and returns wrong tokens if the cache already holds
    the whole prompt. Here a known prefix decides, and a prompt that is cached whole is fed its last token again.

    Raises:
        InputMismatchError: Fewer ids than the cache holds and no way to tell whether they are new.
        NotCroppableError: The prompt is cached whole and the cache cannot go back.
    """
    held, new = cache.seq_length, input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    covered = mask.shape[1] if mask is not None else (getattr(generation_config, "_mask_length", None) or new)
    if not held or not new or covered != new:
        return
    known = cache.known_ids
    shown = min(held, new)
    if known is not None and known.shape[1] >= shown:
        is_full = bool((known[:, :shown] == input_ids[:, :shown].cpu()).all())
    elif new < held:
        raise InputMismatchError(
            f"the cache holds {held} tokens and input_ids has {new}; pass attention_mask of shape "
            f"[{input_ids.shape[0]}, {held + new}] if they are new tokens, or crop the cache if they are not"
        )
    else:
        is_full = True
    if is_full:
        if held >= new:
            cache.crop_to(new - 1)
        return
    new_mask = torch.ones_like(input_ids) if mask is None else mask
    full = torch.cat([new_mask.new_ones(input_ids.shape[0], held), new_mask], dim=1)
    model_kwargs["attention_mask"], model_kwargs["position_ids"] = full, positions_of(full)


def _why_afresh(
    model: PreTrainedModel, batch: PromptBatch | None, cache: PrefixCache, model_kwargs: dict[str, Any], call: Call
) -> str:
    """Return why the prompt has to be computed without reuse, or an empty string."""
    if not call.options.reuse:
        return "reuse is switched off in cache_config"
    extra = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in _PLAIN_ARGUMENTS and isinstance(value, torch.Tensor | list | dict)
    )
    if extra:
        return f"the call passes {', '.join(extra)}, which token ids alone do not show"
    if batch is None:
        return "padding is not on the left alone"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        if mask is None:
            counted = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
        else:
            counted = positions_of(mask)
        if positions.shape != counted.shape or not torch.equal(positions.cpu(), counted.cpu()):
            return "the call passes position_ids of its own"
    if any(batch.padding):
        if any(layer.window is not None for layer in cache.layers):
            return "rows are padded, and padding between prefix and suffix would shift the model's windows"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return "rows are padded, and the model takes no position_ids"
    limit = original_max_positions(model.config)
    if limit is not None and max(len(row) for row in batch.rows) > limit:
        return f"the prompt is longer than {limit} tokens, where the model's rotary scaling changes"
    return ""


def _longest_known(model: PreTrainedModel, tokens: torch.Tensor, call: Call) -> PrefixSnapshot | None:
    """Return the longest prefix of ``tokens`` that the store holds or the caller gave."""
    found = store_for(model).match(tokens, call.fingerprint, call.options.namespace)
    given = given_for(model)
    if given is None or given.input_ids is None:
        return found
    given.verify(model)
    length = common_prefix_length((given.input_ids[0], tokens))
    while length and not given.can_crop_to(length):
        length -= 1
    if not length or (found is not None and found.seq_length >= length):
        return found
    return given.crop_to(length)


def _compute(
    model: PreTrainedModel, tokens: torch.Tensor, known: PrefixSnapshot | None, call: Call, chunk_size: int | None
) -> PrefixSnapshot:
    """Compute ``tokens`` behind ``known`` at batch 1, and keep them for later calls."""
    single = PrefixDynamicCache(config=model.config)
    start = 0
    if known is not None:
        single.load(known, batch_size=1)
        start = known.seq_length
    logits = feed(model, tokens[None, start:], single, chunk_size=chunk_size)
    snapshot = single.snapshot(model=model, input_ids=tokens[None], next_logits=logits)
    store_for(model).insert(snapshot, call.options.namespace)
    return snapshot
