"""Whether forwards attend to what rows share apart: where keys arrive at attention as they are, and where it pays."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .attention import Gate, is_worth_apart, sharing_gate
from .caches import PrefixCache, PrefixDynamicCache
from .compat import attention_implementation, cache_argument, decoder_config, takes_cache
from .validation import vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attending", "decode_gate", "feeds_apart", "hands_keys_over"]

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, bool]] = weakref.WeakKeyDictionary()


def decode_gate(model: PreTrainedModel, rows: int, shared_tokens: int) -> Gate:
    """Decide whether ``rows`` rows on ``shared_tokens`` shared tokens go on with shared-prefix attention."""
    gate = sharing_gate(model, rows, shared_tokens)
    if gate.is_open and not hands_keys_over(model):
        return Gate(False, f"{type(model).__name__} changes its keys between cache and attention")
    return gate


def feeds_apart(model: PreTrainedModel, shared_tokens: int) -> bool:
    """Return whether a prompt behind ``shared_tokens`` shared tokens attends to those apart, be it a single row."""
    return is_worth_apart(model, shared_tokens) and hands_keys_over(model)


def attending(model: PreTrainedModel, cache: PrefixCache) -> AbstractContextManager[None]:
    """Return a block in which forwards of ``model`` on ``cache`` attend to what rows share once, where that pays."""
    if not isinstance(cache, PrefixDynamicCache) or torch.is_grad_enabled():
        return nullcontext()
    is_worth = decode_gate(model, cache.rows or 1, cache.shared_tokens).is_open or feeds_apart(
        model, cache.shared_tokens
    )
    return cache.attend_shared() if is_worth else nullcontext()


def hands_keys_over(model: PreTrainedModel) -> bool:
    """Return whether the keys that a cache returns arrive at Transformers' attention as they are.

    Most models hand them straight on; one that computes something else of them would lose what is kept apart. Three
    forwards of a token or three tell, once for each model, attention implementation, dtype and mode.
    """
    setting = attention_implementation(decoder_config(model.config)), model.dtype, model.training
    with _lock:
        known = _known.get(model)
    if known is None or known[0] != setting:
        known = setting, _try_out(model)
        with _lock:
            _known[model] = known
    return known[1]


@torch.no_grad()
def _try_out(model: PreTrainedModel) -> bool:
    if not takes_cache(model):
        return False

    def run(ids: list[list[int]], cache: PrefixDynamicCache) -> torch.Tensor:
        # Not through the hooks of the model: nobody asked for these forwards.
        forward: Any = model.forward
        input_ids = torch.tensor(ids, device=model.device)
        logits: torch.Tensor = forward(
            input_ids=input_ids, use_cache=True, return_dict=True, **cache_argument(cache)
        ).logits
        return logits.float()

    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Not the first ids: behind special tokens alone, rounding in half precision may make other logits.
        *prefix, one, other = (vocabulary_size(model) * part // 7 for part in range(1, 6))
        # What a model in training draws must not shift what sampling draws.
        with torch.random.fork_rng(devices):
            cache = PrefixDynamicCache(config=model.config)
            run([prefix], cache)
            apart, gathered = cache.fork(batch_size=2), cache.fork(batch_size=2)
            with apart.attend_shared():
                found = run([[one], [other]], apart)
            expected = run([[one], [other]], gathered)
    except Exception:  # whatever it is: the ordinary path stays
        return False
    # Far above rounding, and far below what losing the prefix does.
    allowed = (0.05 if model.dtype.itemsize >= 4 else 0.1) * float(expected.abs().max())
    return bool(((found - expected).abs() <= allowed).all())
