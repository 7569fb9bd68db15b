"""Makes Transformers' ``generate`` know the ``prefix-*`` names, and takes that back."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..caches import PrefixCache, PrefixDynamicCache, PrefixStaticCache
from ..compat import CACHE_ARGUMENT, DECODER_HOOKS, generation_mixin, keeps_padding_mask, name_lists
from ..exceptions import UnknownStrategyError, UnsupportedModelError
from ..fingerprint import fingerprint_of
from ..strategy import choose_strategy
from ..validation import STRATEGIES
from .call import Call, CallOptions, current_call, running_call
from .keep import keep_rows
from .prefill import continue_own_cache, reuse_prefix

__all__ = ["register", "unregister"]

_BUILT = ("prefix-dynamic", "prefix-static")
# Generation modes in which row i of the result continues row i of the prompt.
_ROWS_CONTINUE = ("greedy_search", "sample")

_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}


def register() -> None:
    """Make ``generate`` take the ``prefix-*`` names as ``cache_implementation``. Importing the package does this.

    Calls that do not name them go through Transformers untouched. Calling it again changes nothing.
    """
    mixin = generation_mixin()
    module, (every_name, static_names) = name_lists()
    with _lock:
        if _originals:
            return
        for name in DECODER_HOOKS:
            _originals[name] = getattr(mixin, name)
        for name, hook in (
            ("generate", _generate),
            ("_prepare_cache_for_generation", _prepare_cache),
            ("_prefill", _prefill),
        ):
            setattr(mixin, name, functools.wraps(_originals[name])(hook))
        setattr(module, every_name, getattr(module, every_name) + STRATEGIES)
        setattr(module, static_names, (*getattr(module, static_names), "prefix-static", "prefix-auto"))


def unregister() -> None:
    """Take back what `register` did. Calling it again changes nothing."""
    mixin = generation_mixin()
    module, (every_name, static_names) = name_lists()
    with _lock:
        for name, original in _originals.items():
            setattr(mixin, name, original)
        if _originals:
            for name in (every_name, static_names):
                setattr(module, name, tuple(entry for entry in getattr(module, name) if entry not in STRATEGIES))
        _originals.clear()


def _generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    original = _originals["generate"]
    with running_call() as call:
        result = original(self, *args, **kwargs)
    if call.cache is not None:
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        with torch.no_grad():
            keep_rows(self, sequences, call)
        if call.rows_continue and not any(call.padding):
            call.cache.known_ids = sequences
    return result


def _prepare_cache(
    self: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    strategy = generation_config.cache_implementation
    call = current_call()
    original = _originals["_prepare_cache_for_generation"]
    passed = model_kwargs.get(CACHE_ARGUMENT) is not None
    if strategy not in STRATEGIES or call is None or passed or generation_config.use_cache is False:
        return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    call.options = CallOptions.parse(generation_config.cache_config)
    _check_model(self, strategy)
    rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
    if strategy == "prefix-auto":
        strategy = choose_strategy(self, tokens=max_cache_length, batch_size=rows).strategy
    if strategy not in _BUILT:
        raise UnknownStrategyError(f"{strategy!r} is not built yet in this version; use one of {', '.join(_BUILT)}")
    if strategy == "prefix-static":
        length = max(max_cache_length, generation_config.max_cache_len or 0)
        call.cache = PrefixStaticCache(config=self.config, max_cache_len=length)
        if model_kwargs.get("attention_mask") is None and keeps_padding_mask(self.config):
            shape = (rows, generation_config._mask_length)
            model_kwargs["attention_mask"] = torch.ones(shape, dtype=torch.long, device=self.device)
    else:
        call.cache = PrefixDynamicCache(config=self.config)
    call.strategy = strategy
    call.rows_continue = generation_mode.value in _ROWS_CONTINUE
    if call.options.reuse:
        call.fingerprint = fingerprint_of(self)
    if generation_config.is_assistant:
        call.cache.activate_past_recording()
    model_kwargs[CACHE_ARGUMENT] = call.cache
    return None


def _prefill(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool = True,
) -> Any:
    original = _originals["_prefill"]
    cache, call = model_kwargs.get(CACHE_ARGUMENT), current_call()
    if not isinstance(cache, PrefixCache):
        return original(self, input_ids, generation_config, model_kwargs, is_first_iteration)
    ours = call is not None and call.cache is cache
    if call is not None and ours:
        end_ids = getattr(generation_config, "_eos_token_tensor", None)
        call.end_ids = torch.empty(0, dtype=torch.long) if end_ids is None else end_ids.cpu()
        call.columns = input_ids.shape[1]
        reuse_prefix(self, input_ids, generation_config, model_kwargs, call)
    else:
        continue_own_cache(input_ids, generation_config, model_kwargs, cache)
    outputs = original(self, input_ids, generation_config, model_kwargs, is_first_iteration)
    if call is not None and ours and call.padding == (0,) and any(layer.window is not None for layer in cache.layers):
        call.prompt = cache.snapshot(model=self, input_ids=input_ids, next_logits=outputs.logits[:, -1])
    return outputs


def _check_model(model: PreTrainedModel, strategy: str) -> None:
    """Raise `UnsupportedModelError` for models whose ``generate`` does not go through the wrapped methods."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model, which {strategy!r} does not serve; leave cache_implementation out"
        )
    mixin = generation_mixin()
    for method in ("_prepare_cache_for_generation", "_prefill"):
        if getattr(type(model), method) is not getattr(mixin, method):
            raise UnsupportedModelError(
                f"{name} has its own {method}, so {strategy!r} cannot reuse a prefix exactly there; leave "
                "cache_implementation out"
            )
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModelError(
            f"{name} keeps its state outside of Transformers' Cache, so {strategy!r} does not serve it; leave "
            "cache_implementation out"
        )
