"""The prefill of ``generate``: find what is known, compute what rows share once, leave the rest to Transformers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..caches import PrefixCache, PrefixDynamicCache, PrefixQuantizedCache, PrefixStaticCache
from ..compat import original_max_positions
from ..exceptions import LossyPrefixError
from ..fingerprint import fingerprint_of
from ..forward import feed_prefix
from ..report import GenerationReport, record_report
from ..sharing import decode_gate, feeds_apart
from ..snapshot import PrefixSnapshot
from ..store import store_for
from ..weights import input_device
from .batch import common_prefix_length, moved_mask, positions_of, read_batch
from .call import Call, given_for
from .columns import feed_columns
from .reasons import why_not_beside, why_not_by_ids, within_one_regime
from .strategies import single_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["measured_prefill", "reuse_prefix", "settle_sharing"]

# Rows compute together what they share only if that saves at least this many tokens: it costs a forward of its own.
_WORTH_A_FORWARD = 32


def reuse_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    call: Call,
    *,
    reason: str = "",
) -> None:
    """Put the call's cache at the longest known prefix of ``input_ids`` ``[rows, columns]``.

    Transformers then prefills what is left. ``model_kwargs`` gets the mask and positions that go with it.

    Args:
        model: The model.
        input_ids: The prompts, copies for beams and returned sequences included.
        generation_config: The call's.
        model_kwargs: What ``generate`` passes to the model; changed in place.
        call: The call; is told what may be kept when it ends.
        reason: Why nothing may be reused, where the caller knows one.
    """
    cache, rows = call.cache, input_ids.shape[0]
    if cache is None:
        return
    if input_ids.shape[1]:
        call.known_before = torch.empty(1, 0, dtype=torch.long)
    batch = read_batch(input_ids, model_kwargs.get("attention_mask")) if input_ids.shape[1] else None
    if call.options.reuse and not reason:
        call.fingerprint = fingerprint_of(model)
    unknown = reason or why_not_by_ids(model, batch, model_kwargs)
    if not call.options.reuse and (unknown or not cache.is_lossy):
        unknown = "reuse is switched off in cache_config"
    if batch is None or unknown:
        tokens = _count_tokens(input_ids, model_kwargs)
        record_report(model, GenerationReport(call.strategy, rows, tokens, tokens, 0, unknown, notes=(*call.notes,)))
        return
    call.batch = batch
    limit = original_max_positions(model.config)
    if limit is not None:
        call.kept_columns = batch.columns + limit - batch.longest
    has_windows = not all(layer.is_sliceable for layer in cache.layers)
    max_length = generation_config.max_length or batch.columns
    alone = why_not_beside(model, batch, has_windows=has_windows, max_length=max_length)
    if alone:
        total, notes = batch.tokens, tuple(call.notes)
        record_report(model, GenerationReport(call.strategy, rows, total, total, 0, alone, notes=notes))
        return
    stored, computed = _share_prefix(model, input_ids, generation_config, model_kwargs, call)
    held = cache.seq_length
    error = cache.report().error if isinstance(cache, PrefixQuantizedCache) else None
    computed += batch.tokens - sum(held - (padding if held > call.shared else 0) for padding in batch.padding)
    notes = tuple(call.notes)
    record_report(
        model, GenerationReport(call.strategy, rows, batch.tokens, computed, stored, error=error, notes=notes)
    )


def _share_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    call: Call,
) -> tuple[int, int]:
    """Load what is known and compute what several rows share; return the tokens found and the tokens computed."""
    cache, batch = call.cache, call.batch
    if cache is None or batch is None:
        return 0, 0
    rows, chunk_size = len(batch.rows), generation_config.prefill_chunk_size
    # The last token of every row is always fed: its logits are what generation starts from.
    common = min(common_prefix_length(batch.rows[:: call.copies]), batch.shortest - 1)
    known = _longest_known(model, batch.rows[0][:common], call) if common else None
    stored = 0 if known is None else known.seq_length
    computed = 0
    branch = _branch_point(model, batch.rows[0][:common], call) if common else 0
    if branch - stored >= _WORTH_A_FORWARD:
        known = _compute(model, batch.rows[0][:branch], known, call, chunk_size)
        computed = branch - stored
    # What is lossy is computed apart in any case: what is generated does not depend on whether it was stored.
    if (rows - 1) * (common - stored) >= _WORTH_A_FORWARD or (common > stored and _quantizes(cache, common)):
        known = _compute(model, batch.rows[0][:common], known, call, chunk_size)
        computed = common - stored
    call.shared = 0 if known is None else known.seq_length
    if batch.is_padded and call.shared:
        mask = moved_mask(batch, call.shared, input_ids.device)
        model_kwargs["attention_mask"] = call.moved = mask
        if model_kwargs.get("position_ids") is not None:
            model_kwargs["position_ids"] = positions_of(mask)
    distinct = rows // call.copies
    rest = batch.tokens // call.copies - distinct * (call.shared + 1)
    fold = distinct > 1 and rest * (call.copies - 1) >= _WORTH_A_FORWARD
    if known is not None:
        cache.load(known, batch_size=distinct if fold else rows)
        if isinstance(cache, PrefixDynamicCache):
            call.attends_shared, reason = decode_gate(model, rows, call.shared)
            call.notes += [reason] if reason else []
            cache.defer(call.attends_shared or feeds_apart(model, call.shared))
        elif isinstance(cache, PrefixStaticCache) and feeds_apart(model, call.shared):
            cache.attend_apart(known)
    if fold:
        one_each = {
            name: value[:: call.copies] if isinstance(value, torch.Tensor) else value
            for name, value in model_kwargs.items()
        }
        feed_columns(model, input_ids[:: call.copies, call.shared : -1], cache, one_each, chunk_size=chunk_size)
        cache.batch_repeat_interleave(call.copies)
        computed += rest
    return stored, computed


def settle_sharing(call: Call) -> None:
    """Prepare the call's cache for decode steps, where rows do not attend to what they share apart.

    They would gather the shared prefix at every step. Beams keep it shared: they reorder rows at every step, and what
    is shared needs no reordering.
    """
    cache = call.cache
    if isinstance(cache, PrefixDynamicCache) and not call.is_own_cache and not call.attends_shared:
        cache.defer(False)
        if call.rows_continue:
            cache.unshare()


def _longest_known(model: PreTrainedModel, tokens: torch.Tensor, call: Call) -> PrefixSnapshot | None:
    """Return the longest prefix of ``tokens`` that the store holds or the caller gave."""
    if not call.options.reuse:
        return None
    key = call.cache.lossy_key if isinstance(call.cache, PrefixQuantizedCache) else None
    found = store_for(model).match(
        tokens, call.fingerprint, call.options.namespace, strategy=key, device=input_device(model)
    )
    given = given_for(model)
    if given is None or given.input_ids is None:
        return found
    if given.is_lossy and given.lossy_key != key:
        raise LossyPrefixError(
            f"the prefix passed is lossy ({given.lossy_key}), and the call asks for {key or call.strategy!r}; pass "
            "its strategy as cache_implementation and its options as cache_config, or an exact prefix"
        )
    if given.fingerprint != call.fingerprint:
        given.verify(model)
    if not within_one_regime(model, given, length=len(tokens)):
        return found
    length = common_prefix_length((given.input_ids[0], tokens))
    while length and not given.can_crop_to(length):
        length -= 1
    if not length or (found is not None and found.seq_length >= length):
        return found
    return given.crop_to(length)


def measured_prefill(model: PreTrainedModel, call: Call, tokens: int) -> AbstractContextManager[None]:
    """Measure what is computed inside, where the store has to know how fast ``model`` is."""
    if not call.options.reuse or not call.fingerprint:
        return nullcontext()
    return store_for(model).measured(call.fingerprint, tokens, input_device(model))


def _branch_point(model: PreTrainedModel, tokens: torch.Tensor, call: Call) -> int:
    """Return where ``tokens`` part from a stored prompt that cannot be cut there: a later prompt starts from there."""
    if not call.options.reuse or call.cache is None or call.cache.is_lossy:
        return 0
    store = store_for(model)
    return store.branch_point(tokens, call.fingerprint, call.options.namespace, device=input_device(model))


def _compute(
    model: PreTrainedModel, tokens: torch.Tensor, known: PrefixSnapshot | None, call: Call, chunk_size: int | None
) -> PrefixSnapshot:
    """Compute ``tokens`` behind ``known`` at batch 1, and keep them for later calls."""
    single = single_cache(call.strategy, model.config, call.options.cache)
    start = 0
    if known is not None:
        single.load(known, batch_size=1)
        start = known.seq_length
    with measured_prefill(model, call, len(tokens) - start):
        logits = feed_prefix(model, tokens[None, start:], single, chunk_size=chunk_size)
    snapshot = single.snapshot(model=model, input_ids=tokens[None], next_logits=logits)
    if call.options.reuse:
        store_for(model).insert(snapshot, call.options.namespace)
    return snapshot


def _quantizes(cache: PrefixCache, tokens: int) -> bool:
    """Return whether ``cache`` would quantize some of a prefix of ``tokens`` tokens."""
    return isinstance(cache, PrefixQuantizedCache) and tokens > cache.scheme.residual_length


def _count_tokens(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """Return the prompt tokens of all rows, as far as padding is known."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return int((mask != 0).sum())
    return int(input_ids.numel()) if embeds is None else embeds.shape[0] * embeds.shape[1]
