"""Which models and calls the ``prefix-*`` names serve; the others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..architectures import runs_on_static_caches
from ..caches import PrefixCache, PrefixStaticCache
from ..caches.base import attention_layers
from ..compat import drafts_from_tokens, generation_mixin, takes_cache
from ..exceptions import UnsupportedModelError
from ..forward import check_keeps_cache, has_running_state
from ..layers import DYNAMIC_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_assisted", "check_model", "check_own_assisted", "check_static", "why_not_assisted"]


def check_model(model: PreTrainedModel, strategy: str) -> None:
    """Raise for models whose ``generate`` does not go through the wrapped methods, or whose prefixes cannot be stored.

    Raises:
        UnsupportedModelError: An encoder-decoder model, one with a ``generate`` or cache of its own, or one that
            drops the cache while it trains.
        UnsupportedLayerError: Layers of a kind that is not held exactly.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model, which {strategy!r} does not serve; leave cache_implementation out"
        )
    attention_layers(model.config, f"{strategy!r} in generate", DYNAMIC_KINDS)
    check_keeps_cache(model)
    mixin = generation_mixin()
    for method in ("_prepare_cache_for_generation", "_prefill"):
        if getattr(type(model), method) is not getattr(mixin, method):
            raise UnsupportedModelError(
                f"{name} has its own {method}, so {strategy!r} cannot reuse a prefix exactly there; leave "
                "cache_implementation out"
            )
    if not takes_cache(model):
        raise UnsupportedModelError(
            f"{name} takes its cache by a name of its own on this Transformers release, so {strategy!r} does not "
            "serve it there; install transformers>=5.24, or leave cache_implementation out"
        )
    generator: Any = model
    if not generator._supports_default_dynamic_cache():
        raise UnsupportedModelError(
            f"{name} keeps its state outside of Transformers' Cache, so {strategy!r} does not serve it; leave "
            "cache_implementation out"
        )


def check_assisted(model: PreTrainedModel, cache: PrefixCache) -> None:
    """Raise `UnsupportedModelError` where rejected drafts could not be taken back from ``cache``."""
    if not isinstance(cache, PrefixStaticCache):
        return
    has_state = has_running_state(cache)
    takes_back = (layer.is_sliceable or (layer.is_croppable and layer.window is None) for layer in cache.layers)
    if has_state or not all(takes_back):
        what = "running states" if has_state else "windows"
        raise UnsupportedModelError(
            f"{type(model).__name__} has {what}, from which a static cache cannot take rejected drafts back; use "
            "'prefix-dynamic' for assisted decoding and prompt lookup"
        )


def check_static(model: PreTrainedModel, cache: PrefixCache) -> None:
    """Raise `UnsupportedModelError` where ``generate`` of this release cannot run ``model`` on a static cache."""
    if isinstance(cache, PrefixStaticCache) and not runs_on_static_caches(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not generate on static caches in this release of Transformers; use "
            "'prefix-dynamic', or install a newer one"
        )


def why_not_assisted(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    assistant_model: PreTrainedModel | None,
) -> str:
    """Return why drafts cannot be verified behind a prefix in the cache, or an empty string."""
    if not drafts_from_tokens(generation_config, assistant_model):
        return "drafts are made from what the model computes for the whole prompt"
    method = "prepare_inputs_for_generation"
    if getattr(type(model), method) is not getattr(generation_mixin(), method):
        return f"{type(model).__name__} prepares its inputs by itself, which drafts go through"
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return "the prompt is padded, and drafts are made from it as it was passed"
    return ""


def check_own_assisted(cache: PrefixCache, reason: str) -> None:
    """Raise `UnsupportedModelError` where drafts would be verified on a filled cache against ``reason``."""
    if reason and cache.seq_length:
        raise UnsupportedModelError(
            f"assisted decoding and prompt lookup cannot continue the cache that was passed: {reason}; pass complete "
            "prompts without padding, or an empty cache"
        )
