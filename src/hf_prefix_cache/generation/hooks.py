"""What happens inside ``generate`` with a prefix strategy, or on a prefix cache that the caller passes.

Each hook stands for a method of Transformers' ``GenerationMixin`` and is given the original one first.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..caches import PrefixCache, PrefixDynamicCache, PrefixStaticCache
from ..compat import CACHE_ARGUMENT, forget_rotary_state, keeps_padding_mask, takes_attention_interface
from ..forward import chunk_columns, takes_single_tokens
from ..report import GenerationReport, record_report
from ..sharing import feeds_apart
from ..strategy import choose_strategy
from ..trial import try_own_class
from ..validation import STRATEGIES
from ..weights import input_device
from .call import Call, CallOptions, current_call, running_call
from .columns import feed_columns
from .compiled import pad_compiled_steps, will_compile
from .keep import keep_before_last, keep_rows
from .own_cache import continue_own_cache, remember_ids, tell_padding
from .prefill import measured_prefill, reuse_prefix, settle_sharing
from .reasons import passes_only_ids
from .static_sizes import choose_size, give_back, take_buffers
from .strategies import growing_cache
from .support import check_assisted, check_model, check_own_assisted, check_static, why_not_assisted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HOOKS"]

_logger = logging.getLogger(__name__)

_ASSISTED = "assisted_generation"
# Generation modes in which row i of the result continues row i of the prompt.
_ROWS_CONTINUE = ("greedy_search", "sample", _ASSISTED)


def _generate(original: Callable[..., Any], self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    with running_call() as call:
        result = None
        try:
            result = original(self, *args, **kwargs)
            sequences = getattr(result, "sequences", result)
            if call.cache is not None and isinstance(sequences, torch.Tensor):
                with torch.no_grad():
                    if call.rows_continue:
                        keep_rows(self, sequences, call)
                    remember_ids(sequences, call)
        finally:
            if isinstance(call.cache, PrefixDynamicCache):
                call.cache.defer(False)
            elif isinstance(call.cache, PrefixStaticCache) and not call.is_own_cache:
                call.cache.reach = None
                if not hasattr(result, "keys"):
                    give_back(self, call.cache)
    return result


def _prepare_cache(
    original: Callable[..., Any],
    self: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    call, passed = current_call(), model_kwargs.get(CACHE_ARGUMENT)
    is_ours = generation_config.cache_implementation in STRATEGIES
    if is_ours and generation_config.is_assistant:
        # An assistant takes its cache along from draft to draft by itself; Transformers ignores a name on it.
        is_ours, generation_config.cache_implementation = False, None
    if call is not None and not generation_config.is_assistant:
        call.rows_continue = generation_mode.value in _ROWS_CONTINUE
        if isinstance(passed, PrefixCache):
            check_static(self, passed)
            call.cache, call.is_own_cache = passed, True
            if isinstance(passed, PrefixStaticCache):
                pad_compiled_steps()
        elif is_ours and passed is None:
            call.copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            if generation_config.use_cache is not False:
                is_assisted = generation_mode.value == _ASSISTED
                # Drafts from the prompt may reach beyond the end, and are taken back.
                needed = max_cache_length + is_assisted * (generation_config.prompt_lookup_num_tokens or 1)
                _make_cache(self, generation_config, model_kwargs, batch_size * call.copies, needed, call)
                if is_assisted and call.cache is not None:
                    check_assisted(self, call.cache)
                model_kwargs[CACHE_ARGUMENT] = call.cache
                return None
            tokens = batch_size * call.copies * getattr(generation_config, "_mask_length", 0)
            name = str(generation_config.cache_implementation)
            record_report(self, GenerationReport(name, batch_size, tokens, tokens, 0, "use_cache is False"))
    return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)


def _make_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    rows: int,
    max_cache_length: int,
    call: Call,
) -> None:
    """Make the cache of a call that names a prefix strategy."""
    strategy = str(generation_config.cache_implementation)
    call.options = CallOptions.parse(generation_config.cache_config, strategy)
    check_model(model, strategy)
    if strategy == "prefix-auto":
        try_own_class(model)
        compiles = will_compile(model, generation_config)
        strategy = choose_strategy(model, tokens=max_cache_length, batch_size=rows, compiles=compiles).strategy
    if strategy != "prefix-static":
        call.cache = growing_cache(strategy, model.config, call.options.cache)
    else:
        call.cache = _make_static(model, generation_config, rows, max_cache_length, call)
        check_static(model, call.cache)
        if model_kwargs.get("attention_mask") is None and keeps_padding_mask(model.config):
            shape = (rows, int(generation_config._mask_length or 0))
            model_kwargs["attention_mask"] = torch.ones(shape, dtype=torch.long, device=input_device(model))
    call.strategy = strategy


def _make_static(
    model: PreTrainedModel, generation_config: GenerationConfig, rows: int, needed: int, call: Call
) -> PrefixStaticCache:
    """Make static buffers for ``rows`` rows of ``needed`` tokens, or take those that compiled code is made for."""
    pinned = generation_config.max_cache_len
    if not will_compile(model, generation_config):
        length = max(needed, pinned or 0)
        return PrefixStaticCache(config=model.config, max_cache_len=length, max_batch_size=rows)
    pad_compiled_steps()
    size, notice = choose_size(model, rows=rows, needed=needed, pinned=pinned)
    if notice:
        _logger.warning(notice)
        call.notes.append(notice)
    return take_buffers(model, size)


def _prefill(
    original: Callable[..., Any],
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool = True,
) -> Any:
    call = _call_on(model_kwargs)
    if call is None or call.cache is None:
        return original(self, input_ids, generation_config, model_kwargs, is_first_iteration)
    is_compiled = generation_config.prefill_chunk_size is not None and not passes_only_ids(model_kwargs)
    if not isinstance(call.cache, PrefixStaticCache) or is_compiled or not takes_attention_interface(self):
        return _feed_prompts(original, self, input_ids, generation_config, model_kwargs, is_first_iteration, call)
    with call.cache.reading_held():
        return _feed_prompts(original, self, input_ids, generation_config, model_kwargs, is_first_iteration, call)


def _feed_prompts(
    original: Callable[..., Any],
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool,
    call: Call,
) -> Any:
    cache: Any = call.cache
    is_complete = _find_prefix(self, input_ids, generation_config, model_kwargs, call)
    held, unfed = cache.seq_length, input_ids
    # Chunks of what ids alone show are fed here, never compiled: each length of a chunk would be compiled by itself.
    feeds_chunks = passes_only_ids(model_kwargs) and not takes_single_tokens(self, cache)
    if (held or feeds_chunks) and model_kwargs.get("inputs_embeds") is None:
        # Transformers slices complete prompts itself, but not in every release and not for chunks.
        unfed = input_ids[:, held:] if is_complete else input_ids
        chunk_size = 1 if held and takes_single_tokens(self, cache) else generation_config.prefill_chunk_size
        if chunk_size is None and feeds_chunks:
            columns = input_ids.shape[1] if is_complete else held + input_ids.shape[1]
            chunk_size = chunk_columns(self, cache, rows=input_ids.shape[0], length=columns)
        if chunk_size:
            first = max(0, unfed.shape[1] - 1) // chunk_size * chunk_size
            if first:
                feed_columns(self, unfed[:, :first], cache, model_kwargs, chunk_size=chunk_size)
            unfed = unfed[:, first:]
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = None
    chunk_size = generation_config.prefill_chunk_size
    rest = keep_before_last(self, input_ids, unfed, model_kwargs, call, chunk_size=chunk_size)
    if rest is not unfed or takes_single_tokens(self, cache):
        # One token is left, or all of them must go in together.
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
    with measured_prefill(self, call, rest.numel()):
        outputs = original(self, rest, generation_config, model_kwargs, is_first_iteration)
    if not call.is_own_cache and (not call.rows_continue or not all(layer.is_sliceable for layer in cache.layers)):
        # Later, the windows will have moved on, or the rows will be mixed.
        keep_rows(self, input_ids, call, next_logits=outputs.logits[:, -1])
    settle_sharing(call)
    return outputs


def _assisted_decoding(
    original: Callable[..., Any], self: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    call = _call_on(kwargs)
    if call is not None and call.cache is not None:
        named = inspect.signature(original).parameters
        model_kwargs = {name: value for name, value in kwargs.items() if name not in named}
        config = kwargs["generation_config"]
        reason = why_not_assisted(self, config, model_kwargs, kwargs.get("assistant_model"))
        if call.is_own_cache:
            check_assisted(self, call.cache)
            check_own_assisted(call.cache, reason)
        if not _find_prefix(self, input_ids, config, model_kwargs, call, reason=reason):
            check_own_assisted(call.cache, "new tokens alone were passed")
        settle_sharing(call)
        if not reason:
            unfed, chunk_size = input_ids[:, call.cache.seq_length :], config.prefill_chunk_size
            keep_before_last(self, input_ids, unfed, model_kwargs, call, chunk_size=chunk_size, windows=True)
        kwargs.update(model_kwargs)
        call.feeds_drafts = True
    return original(self, input_ids, *args, **kwargs)


def _prepare_inputs(
    original: Callable[..., Any], self: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    call = _call_on(kwargs)
    if call is not None and call.cache is not None and call.feeds_drafts and kwargs.get("is_first_iteration"):
        # The first drafts come behind the complete prompt, of which the cache holds a part.
        call.feeds_drafts = False
        if call.cache.seq_length:
            kwargs["next_sequence_length"] = input_ids.shape[1] - call.cache.seq_length
    if call is not None and call.steps is not None and isinstance(call.cache, PrefixStaticCache):
        # Here, where the masks are made, which have to be as wide.
        call.steps.choose(call.cache, added=kwargs.get("next_sequence_length") or input_ids.shape[1])
    return original(self, input_ids, *args, **kwargs)


def _call_on(model_kwargs: dict[str, Any]) -> Call | None:
    """Return the running call if the cache in ``model_kwargs`` is its own."""
    call = current_call()
    return call if call is not None and model_kwargs.get(CACHE_ARGUMENT) is call.cache else None


def _find_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    call: Call,
    *,
    reason: str = "",
) -> bool:
    """Put the call's cache where the prompts begin to be new; return whether ``input_ids`` are complete prompts."""
    forget_rotary_state(model)
    is_complete = True
    if call.is_own_cache:
        is_complete = continue_own_cache(model, input_ids, generation_config, model_kwargs, call)
        if isinstance(call.cache, PrefixDynamicCache) and feeds_apart(model, call.cache.shared_tokens):
            call.cache.defer(True)  # the caller's cache goes on sharing what it shares
    else:
        end_ids = getattr(generation_config, "_eos_token_tensor", None)
        if end_ids is not None:
            call.end_ids = end_ids.cpu()
        reuse_prefix(model, input_ids, generation_config, model_kwargs, call, reason=reason)
    if call.cache is not None:
        tell_padding(call.cache, model_kwargs.get("attention_mask"))
    return is_complete


HOOKS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "_prepare_cache_for_generation": _prepare_cache,
    "_prefill": _prefill,
    "_assisted_decoding": _assisted_decoding,
    "prepare_inputs_for_generation": _prepare_inputs,
}
"""The wrapped methods, with what stands for them."""
