"""What ``generate`` compiles: batches smaller than the buffers run in all rows, and attention reads as needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig, GenerationConfig

from ..caches import PrefixStaticCache
from ..compat import CACHE_ARGUMENT
from ..exceptions import UnsupportedLayerError, UnsupportedModelError
from ..layers import PrefixRecurrentLayer
from .call import current_call
from .static_sizes import find_steps, size_of
from .steps import reading_as_needed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compile_config_of", "in_all_rows", "leave_compiled_steps", "pad_compiled_steps", "will_compile"]

_lock = threading.Lock()
_original: list[Callable[..., Any]] = []


def will_compile(model: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Return whether ``generate`` compiles the decode steps of a call on a static cache."""
    generator: Any = model
    try:
        probe = PrefixStaticCache(config=model.config, max_cache_len=1)
    except (UnsupportedLayerError, UnsupportedModelError):  # what has no buffers has no steps to compile
        return False
    return bool(generator._valid_auto_compile_criteria({CACHE_ARGUMENT: probe}, generation_config))


def compile_config_of(model: PreTrainedModel, compile_config: CompileConfig | None) -> CompileConfig:
    """Return how ``generate`` compiles where it is given ``compile_config``."""
    generator: Any = model
    config: CompileConfig = compile_config or generator._default_compile_config()
    return config


def pad_compiled_steps() -> None:
    """Make what ``generate`` compiles run on all rows of our static caches; other calls go through untouched."""
    from transformers import PreTrainedModel  # not at import: it takes seconds

    with _lock:
        if not _original:
            _original.append(PreTrainedModel.get_compiled_call)
            PreTrainedModel.get_compiled_call = _get_compiled_call  # type: ignore[method-assign]


def leave_compiled_steps() -> None:
    """Take back what `pad_compiled_steps` did."""
    with _lock:
        if _original:
            from transformers import PreTrainedModel

            PreTrainedModel.get_compiled_call = _original.pop()  # type: ignore[method-assign]


def _get_compiled_call(self: PreTrainedModel, compile_config: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = _original[0](self, compile_config)
    call = current_call()
    cache = None if call is None else call.cache
    if call is None or not isinstance(cache, PrefixStaticCache):
        return compiled
    if not call.is_own_cache and compiled != self.__call__:  # some models are never compiled
        call.steps = find_steps(self, size_of(cache), compile_config_of(self, compile_config))
    return in_all_rows(reading_as_needed(compiled, self, call.steps, cache), cache)


def in_all_rows(compiled: Callable[..., Any], cache: PrefixStaticCache) -> Callable[..., Any]:
    """Return ``compiled``, made to run a batch smaller than the buffers of ``cache`` in all of their rows.

    The rows beyond the batch repeat its first one; what they compute is dropped. So one graph serves every batch.

    Args:
        compiled: The model's compiled call.
        cache: The static cache that its calls are on.
    """
    layers = cache.layers
    if any(isinstance(layer, PrefixRecurrentLayer) for layer in layers):
        return compiled

    def call(*args: Any, **inputs: Any) -> Any:
        ids = inputs.get("input_ids")
        rows = None if ids is None else int(ids.shape[0])
        capacity = int(layers[0].batch_size) if layers[0].is_initialized else rows
        if rows is None or capacity is None or rows == capacity:
            return compiled(*args, **inputs)
        try:
            for layer in layers:  # for what the compiler leaves to eager code
                layer.active_rows = capacity
            outputs = compiled(**{name: _repeat_first(value, rows, capacity) for name, value in inputs.items()})
        finally:
            for layer in layers:
                layer.active_rows = rows
        for name, value in outputs.items():
            outputs[name] = _first_rows(value, rows, capacity)
        return outputs

    return call


def _repeat_first(value: Any, rows: int, capacity: int) -> Any:
    """Return tensors ``[rows, ...]`` in ``value`` with copies of their first row behind, ``[capacity, ...]``."""
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == rows:
        return torch.cat([value, value[:1].expand(capacity - rows, *value.shape[1:])])
    if isinstance(value, dict):
        return {name: _repeat_first(entry, rows, capacity) for name, entry in value.items()}
    return value


def _first_rows(value: Any, rows: int, capacity: int) -> Any:
    """Return tensors ``[capacity, ...]`` in ``value`` without the rows from ``rows`` on."""
    if isinstance(value, torch.Tensor):
        return value[:rows] if value.ndim > 1 and value.shape[0] == capacity else value
    if isinstance(value, tuple):
        return tuple(_first_rows(entry, rows, capacity) for entry in value)
    return value
