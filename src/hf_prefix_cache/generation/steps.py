"""Decode steps that attend only as far as needed: one graph for each of a few lengths of static buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ..architectures import masks_all_places
from ..caches import PrefixStaticCache
from ..compat import keeps_padding_mask

if TYPE_CHECKING:
    from transformers import CompileConfig, PreTrainedConfig

__all__ = ["DecodeSteps", "reaches_of", "reading_as_needed"]

# Each is a graph to compile, for every batch size; what is pinned is often long against what is used.
_PARTS = (2, 8)
# Places by which a reach is shorter than the next, at least: for fewer, the time of a step is that of the weights.
_LEAST_SAVED = 512

_names = itertools.count()


def reaches_of(config: PreTrainedConfig, max_cache_len: int) -> tuple[int, ...]:
    """Return how many places of static buffers steps may read, the largest number first: all, and some parts.

    Args:
        config: The model's.
        max_cache_len: Tokens that the buffers hold.
    """
    cache = PrefixStaticCache(config=config, max_cache_len=1)
    # FlashAttention takes what its mask shows out of the buffers: it reads no more than is held anyway.
    if not cache.full_layers or masks_all_places(config) or keeps_padding_mask(config):
        return (max_cache_len,)
    reaches = [max_cache_len]
    for part in _PARTS:
        if reaches[-1] - max_cache_len // part < _LEAST_SAVED:
            break
        reaches.append(max_cache_len // part)
    return tuple(reaches)


class DecodeSteps:
    """The compiled decode steps on static buffers of one size, for reaches shorter than all of it.

    Args:
        config: How they are compiled.

    Attributes:
        config: The same.
        reaches: Which of them calls may use.
    """

    def __init__(self, config: CompileConfig) -> None:
        self.config = config
        self.reaches: tuple[int, ...] = ()
        self._compiled: dict[int, Callable[..., Any]] = {}

    def choose(self, cache: PrefixStaticCache, *, added: int) -> None:
        """Set how far the next forward on ``cache``, of ``added`` tokens, reads: only single tokens go by steps."""
        fits = [reach for reach in self.reaches if added == 1 and reach > cache.full_layers[0].seen()]
        cache.reach = min(fits, default=None)

    def add(self, reach: int) -> None:
        """Let calls use the step that reads ``reach`` places; the first that does compiles it."""
        if reach not in self._compiled:
            self._compiled[reach] = _compile_apart(self.config)
        self.reaches += (reach,)

    def at(self, reach: int) -> Callable[..., Any]:
        """Return the compiled step that reads ``reach`` places; its first argument is the model."""
        return self._compiled[reach]


def reading_as_needed(
    compiled: Callable[..., Any], model: torch.nn.Module, steps: DecodeSteps | None, cache: PrefixStaticCache
) -> Callable[..., Any]:
    """Return ``compiled``, with the step of ``steps`` in its place where a reach is set on ``cache``.

    Args:
        compiled: The model's compiled call.
        model: The model.
        steps: Its steps on buffers of this size, where they were compiled ahead.
        cache: The static cache that the calls are on.
    """

    def call(*args: Any, **inputs: Any) -> Any:
        reach = cache.reach
        if reach is not None:
            # Compiled code cannot see how much is held: a reach that is too short would leave tokens out unnoticed.
            cache.full_layers[0].check_room(1)
        if reach is None or steps is None:
            return compiled(*args, **inputs)
        return steps.at(reach)(model, *args, **inputs)

    return call


def _compile_apart(config: CompileConfig) -> Callable[..., Any]:
    """Compile a call of a model by itself.

    The compiler counts its graphs, and finds out which sizes change, by code object and by its name: this one has its
    own, so that the graphs of all reaches and batch sizes stay within its limit, each with fixed sizes.
    """

    def step(model: torch.nn.Module, *args: Any, **inputs: Any) -> Any:
        return model(*args, **inputs)

    code = step.__code__.replace(co_name=f"decode_step_{next(_names)}")
    compiled: Callable[..., Any] = torch.compile(FunctionType(code, globals()), **config.to_dict())
    return compiled
