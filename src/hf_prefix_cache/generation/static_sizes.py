"""Which sizes of static buffers a model has compiled code for, and the buffers that are kept for it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from ..caches import PrefixStaticCache
from ..compat import decoder_config
from ..fingerprint import same_architecture
from ..layers import PrefixRecurrentLayer
from .steps import DecodeSteps

if TYPE_CHECKING:
    from transformers import CompileConfig, PreTrainedConfig, PreTrainedModel

__all__ = [
    "StaticSize",
    "begin_steps",
    "choose_size",
    "find_steps",
    "give_back",
    "keep_buffers",
    "release_buffers",
    "size_of",
    "take_buffers",
]


class StaticSize(NamedTuple):
    """Rows and tokens of static buffers, which compiled code is made for."""

    rows: int
    length: int


class _Kept:
    """What is known of one model: the sizes in use, and buffers that are free."""

    def __init__(self) -> None:
        self.sizes: set[StaticSize] = set()
        self.kept: set[StaticSize] = set()  # sizes of which the buffers stay
        self.free: dict[StaticSize, list[PrefixStaticCache]] = {}
        self.steps: dict[StaticSize, DecodeSteps] = {}  # of sizes that were warmed up


_lock = threading.Lock()
_models: weakref.WeakKeyDictionary[PreTrainedModel, _Kept] = weakref.WeakKeyDictionary()


def choose_size(model: PreTrainedModel, *, rows: int, needed: int, pinned: int | None) -> tuple[StaticSize, str]:
    """Return the buffers for a call that compiles: such as there is code for already, or else new ones.

    Smaller batches run in the rows of larger ones, shorter calls in longer buffers. A length that the user pinned is
    kept to; without one, lengths are powers of two, so that they double when they are outgrown.

    Args:
        model: The model.
        rows: Rows of the batch.
        needed: Tokens that each may grow to.
        pinned: ``max_cache_len`` of the call.

    Returns:
        The size, and a notice in words where buffers grow.
    """
    is_pinned = pinned is not None and pinned >= needed
    with _lock:
        kept = _models.setdefault(model, _Kept())
        fits = [
            size
            for size in kept.sizes
            if (size.length == pinned if is_pinned else size.length >= needed)
            and (size.rows == rows or (size.rows > rows and _takes_more_rows(model.config)))
        ]
        if fits:
            return min(fits, key=lambda size: size.rows * size.length), ""
        length = pinned if pinned is not None and is_pinned else _doubled(model, needed)
        before = max((size.length for size in kept.sizes), default=0)
        size = StaticSize(rows, length)
        kept.sizes.add(size)
    if is_pinned or (pinned is None and not 0 < before < length):
        return size, ""
    was = f"max_cache_len is {pinned}" if pinned is not None else f"static buffers held {before} tokens"
    return size, (
        f"{was} and the call may need {needed}: they grow to {length}, and decoding is compiled again; pass "
        "max_cache_len, as large as any call needs, to compile once"
    )


def take_buffers(model: PreTrainedModel, size: StaticSize) -> PrefixStaticCache:
    """Return an empty cache of ``size``: the one that was kept, at the addresses it had, or a new one."""
    config = decoder_config(model.config)
    with _lock:
        free = _models.setdefault(model, _Kept()).free.get(size, [])
        while free:
            cache = free.pop()
            held = [(tensor.dtype, tensor.device) for tensor in cache.tensors[:1]]
            if same_architecture(cache._config, config) and held == [(model.dtype, model.device)]:
                return cache
    return PrefixStaticCache(config=config, max_cache_len=size.length, max_batch_size=size.rows)


def size_of(cache: PrefixStaticCache) -> StaticSize:
    """Return the size that ``cache`` was made for."""
    return StaticSize(cache._options["max_batch_size"], cache._options["max_cache_len"])


def give_back(model: PreTrainedModel, cache: PrefixStaticCache) -> None:
    """Keep the buffers of a call that has ended, where `keep_buffers` asked for it; nobody else may hold ``cache``."""
    size = size_of(cache)
    with _lock:
        kept = _models.get(model)
        is_wanted = kept is not None and size in kept.kept
    if not is_wanted or kept is None or not cache.tensors:
        return
    cache.reset()
    with _lock:
        if not kept.free.get(size):  # one is enough, also where several threads ran at once
            kept.free[size] = [cache]


def keep_buffers(model: PreTrainedModel, size: StaticSize) -> None:
    """Let buffers of ``size`` stay when a call ends, so that later calls find them at the same addresses."""
    with _lock:
        kept = _models.setdefault(model, _Kept())
        kept.sizes.add(size)
        kept.kept.add(size)


def release_buffers(model: PreTrainedModel, size: StaticSize) -> None:
    """Take back what `keep_buffers` did, and free the buffers."""
    with _lock:
        kept = _models.get(model)
        if kept is not None:
            kept.kept.discard(size)
            kept.free.pop(size, None)


def begin_steps(model: PreTrainedModel, size: StaticSize, config: CompileConfig) -> DecodeSteps:
    """Return the decode steps of calls on buffers of ``size`` that compile by ``config``: none, to begin with."""
    with _lock:
        known = _models.setdefault(model, _Kept()).steps
        if size not in known or known[size].config != config:
            known[size] = DecodeSteps(config)
        known[size].reaches = ()
        return known[size]


def find_steps(model: PreTrainedModel, size: StaticSize, config: CompileConfig) -> DecodeSteps | None:
    """Return what `begin_steps` made, or None where nothing is compiled ahead by ``config`` for such buffers."""
    with _lock:
        kept = _models.get(model)
        steps = None if kept is None else kept.steps.get(size)
    return steps if steps is not None and steps.config == config else None


def _doubled(model: PreTrainedModel, needed: int) -> int:
    doubled = 1 << (needed - 1).bit_length()
    limit = getattr(decoder_config(model.config), "max_position_embeddings", None) or doubled
    return max(needed, min(doubled, limit))


def _takes_more_rows(config: PreTrainedConfig) -> bool:
    """Return whether rows without a prompt may run along: not beside running states, which have a row for each."""
    cache = PrefixStaticCache(config=config, max_cache_len=1)
    return not any(isinstance(layer, PrefixRecurrentLayer) for layer in cache.layers)
