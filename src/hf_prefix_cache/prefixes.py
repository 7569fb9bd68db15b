"""Prefixes of the wrapper: computing what is not known yet of one, and taking one in the form that a user has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .caches import PrefixCache, PrefixQuantizedCache
from .compat import forget_rotary_state, original_max_positions
from .exceptions import BatchSizeError, InputMismatchError, SnapshotIncompleteError, UnsupportedModelError
from .fingerprint import fingerprint_of
from .forward import feed_prefix, has_running_state
from .generation import computes_randomly
from .generation.strategies import single_cache
from .snapshot import PrefixSnapshot
from .store import store_for
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["as_snapshot", "compute_prefix", "known_prefix"]


def compute_prefix(
    model: PreTrainedModel, input_ids: torch.Tensor, *, strategy: str, options: dict[str, Any]
) -> PrefixSnapshot:
    """Return a complete snapshot of ``input_ids`` ``[1, tokens]``, of which the model's store may know a part.

    Args:
        model: The model; the snapshot is kept in its store.
        input_ids: The tokens.
        strategy: Cache strategy that computes them.
        options: Options of the strategy's cache.

    Raises:
        UnsupportedModelError: The model is in training mode with dropout.
    """
    if computes_randomly(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode with dropout, so a prefix would be another one every time it "
            "is computed; call eval() first, or set its dropout to 0"
        )
    forget_rotary_state(model)
    ids, length = input_ids, input_ids.shape[1]
    store, fingerprint = store_for(model), fingerprint_of(model)
    limit = original_max_positions(model.config)
    is_short = limit is None or length <= limit  # beyond it, all tokens have other keys, and only in one forward
    cache = single_cache(strategy, model.config, options)
    key = cache.lossy_key if isinstance(cache, PrefixQuantizedCache) else None
    device = input_device(model)
    known = store.match(ids[0], fingerprint, strategy=key, device=device) if is_short else None
    if known is not None and known.seq_length == length:
        if known.next_logits is not None and known.lossy_key == key:
            return known
        known = store.match(ids[0, :-1], fingerprint, strategy=key, device=device) if length > 1 else None
    if known is not None:
        cache.load(known, batch_size=1)
    if has_running_state(cache) and is_short and not cache.is_lossy and length - cache.seq_length > 1:
        # A running state exists only where it was kept: from here, the whole prefix can be asked as a prompt.
        feed_prefix(model, ids[:, cache.seq_length : -1], cache)
        store.insert(cache.snapshot(model=model, input_ids=ids[:, :-1]))
    with store.measured(fingerprint, length - cache.seq_length, device):
        logits = feed_prefix(model, ids[:, cache.seq_length :], cache)
    snapshot = cache.snapshot(model=model, input_ids=ids, next_logits=logits)
    if is_short:
        store.insert(snapshot)
    return snapshot


def known_prefix(model: PreTrainedModel, prefix: PrefixSnapshot | PrefixCache) -> PrefixSnapshot:
    """Return ``prefix`` as a snapshot of one row whose tokens can be matched, verified against ``model``.

    Raises:
        InputMismatchError: It is neither a snapshot nor a cache.
        BatchSizeError: It has several rows.
        SnapshotIncompleteError: It does not know its tokens, or has padding.
        FingerprintMismatchError: Another model computed it, or this one in another state.
    """
    forget_rotary_state(model)
    if isinstance(prefix, PrefixCache) and prefix.known_ids is not None and prefix.rows == 1:
        fork = prefix.fork()
        fork.crop_to(prefix.known_ids.shape[1])
        snapshot = fork.snapshot(model=model, input_ids=prefix.known_ids)
    else:
        snapshot = as_snapshot(prefix)
    if snapshot.batch_size != 1:
        raise BatchSizeError(f"prefix has {snapshot.batch_size} rows; a prefix is one row: pass that of one row")
    if snapshot.input_ids is None or snapshot.padding_mask is not None:
        what = "has padding" if snapshot.input_ids is not None else "does not know its token ids"
        raise SnapshotIncompleteError(
            f"prefix {what}, so nothing can be matched; take it with prefill, or with "
            "cache.snapshot(model=..., input_ids=...) of a cache without padding"
        )
    snapshot.verify(model)
    return snapshot


def as_snapshot(prefix: PrefixSnapshot | PrefixCache) -> PrefixSnapshot:
    """Return ``prefix``, or what it holds now.

    Raises:
        InputMismatchError: It is neither a snapshot nor a cache.
    """
    if isinstance(prefix, PrefixSnapshot):
        return prefix
    if isinstance(prefix, PrefixCache):
        return prefix.snapshot()
    raise InputMismatchError(f"prefix is a {type(prefix).__name__}; pass a snapshot from prefill, or a prefix cache")
