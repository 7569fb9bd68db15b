"""How much each layer of a model keeps of every token."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .architectures import why_no_cache
from .compat import LayerSpec, decoder_config, layer_specs

__all__ = ["key_value_widths"]

_HOLD_NONE = ("conv", "linear_attention", "dummy")


def key_value_widths(config: PreTrainedConfig) -> list[int]:
    """Return how many numbers each layer caches for a token, key and value together.

    It is 0 for layers that keep a running state alone, or read what another layer holds, and for models that keep
    nothing in a `Cache` of Transformers.

    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
        >>> key_value_widths(LlamaConfig(**sizes))
        [64, 64, 64]
    """
    specs, decoder = layer_specs(config), decoder_config(config)
    if why_no_cache(config):
        return [0] * len(specs)
    # Layers of one model may differ in their heads (Gemma 4).
    layers = getattr(decoder, "per_layer_config", None)
    if layers is None or len(layers) != len(specs):
        layers = [decoder] * len(specs)
    return [0 if spec.kind in _HOLD_NONE else _width(spec, layer) for spec, layer in zip(specs, layers, strict=True)]


def _width(spec: LayerSpec, layer: Any) -> int:
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:  # latent attention holds what keys and values are made of, and rotary keys for all heads
        return int(latent) + int(layer.qk_rope_head_dim)
    if spec.window is not None and getattr(layer, "swa_num_key_value_heads", None):
        return 2 * int(layer.swa_num_key_value_heads) * int(layer.swa_head_dim)
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    if getattr(layer, "new_decoder_architecture", False):
        heads = layer.num_kv_heads
    elif getattr(layer, "multi_query", False):
        heads = 1
    keys = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    values = getattr(layer, "v_head_dim", None) or keys
    return int(heads) * (int(keys) + int(values))
