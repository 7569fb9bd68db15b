"""Make a tiny configuration of any architecture: the same layers, fewer and smaller."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

__all__ = ["WINDOW", "shrunk_config"]

WINDOW = 8
"""Width of every window and chunk, so narrow that short texts are past it."""

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers")
# What configurations call their sizes. Only names that a configuration has are passed.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "audio_vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "word_embed_proj_dim", "model_dim"), 32),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "vision_feature_size", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("dff", "block_ff_dim", "mlp_hidden_size", "feed_forward_size"), 48),
    **dict.fromkeys(_LAYER_COUNTS, 4),
    **dict.fromkeys(("encoder_layers", "depth", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "lightning_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "hidden_size_per_layer_input", "kv_channels", "d_kv", "attention_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"), 256),
    **dict.fromkeys(("max_sequence_length", "context_length", "max_seq_length"), 256),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "sliding_window_size", "attention_window_size"), WINDOW),
    "floor_scale": 16,
    **dict.fromkeys(("index_topk", "index_head_dim", "laurel_rank"), 8),
    # So many that no index score is exactly 0: such scores tie, and which of them win is then left to chance.
    "index_n_heads": 16,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    # Running states.
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_dt_rank", "time_step_rank"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "conv_chunk_size"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "expand": 2,
    # Vision and audio towers, which no test of this package runs.
    **dict.fromkeys(("image_size", "max_image_size"), 32),
    "patch_size": 16,
    "num_mel_bins": 16,
    # Random models would otherwise stop early, repeat their last token, or differ too little to compare.
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
    "use_cache": True,
    "is_decoder": True,
}
# Lists with one entry for each layer, whose entries are the kinds of layers that an architecture has.
_KIND_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


def shrunk_config(model_type: str, overrides: dict[str, Any] | None = None, *, skip: tuple[str, ...] = ()) -> Any:
    """Return a tiny configuration of ``model_type``.

    Args:
        model_type: A name of Transformers' configuration mapping.
        overrides: What to pass beside, or instead of, the usual sizes; a key ``"text_config"`` holds those of the
            text decoder where the architecture has one of its own.
        skip: Usual sizes to leave as the architecture has them.
    """
    return _shrunk(CONFIG_MAPPING[model_type], overrides or {}, skip, None)


def _shrunk(config_class: Any, overrides: dict[str, Any], skip: tuple[str, ...], default: Any) -> PreTrainedConfig:
    if default is None:
        try:
            default = config_class()
        except Exception:  # some have no valid defaults
            default = config_class(**overrides)
    settings = _sizes_for(default, skip)
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        sub_default = _read(default, name)
        if sub_class is AutoConfig:
            sub_class = type(sub_default) if isinstance(sub_default, PreTrainedConfig) else None
        if sub_class is None or not inspect.isclass(sub_class) or overrides.get(name, {}) is None:
            continue
        sub_overrides = overrides.get(name, {})
        if isinstance(sub_overrides, dict):
            settings[name] = _shrunk(sub_class, sub_overrides, skip, sub_default).to_dict()
    if any(name in overrides for name in _KIND_LISTS):
        settings = {key: value for key, value in settings.items() if key not in _KIND_LISTS}
        settings["num_hidden_layers"] = max(len(overrides[name]) for name in _KIND_LISTS if name in overrides)
    subs = getattr(config_class, "sub_configs", {})
    plain = {key: value for key, value in overrides.items() if key not in subs}
    return config_class(**{**settings, **plain})


def _read(config: PreTrainedConfig, name: str) -> Any:
    """Return an entry of ``config``; None where layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception:  # Transformers' own class for that is not in every release
        return None


def _sizes_for(config: PreTrainedConfig, skip: tuple[str, ...]) -> dict[str, Any]:
    known = set(inspect.signature(type(config).__init__).parameters)
    known |= set(getattr(type(config), "__dataclass_fields__", {})) | set(type(config).attribute_map)
    known |= set(config.to_dict())
    settings: dict[str, Any] = {}
    for name, value in _SIZES.items():
        if name in known and name not in skip and not isinstance(_read(config, name), (list, dict)):
            settings[name] = value
    layers = 0
    for name in _KIND_LISTS:
        kinds = _read(config, name)
        is_derived = isinstance(getattr(type(config), type(config).attribute_map.get(name, name), None), property)
        if name in known and not is_derived and name not in skip and isinstance(kinds, (list, tuple)) and kinds:
            distinct = list(dict.fromkeys(kinds))
            settings[name] = distinct * 2
            layers = max(layers, len(settings[name]))
    if _read(config, "layer_types") is None:
        # All of one kind, as Transformers takes them.
        settings |= {name: 2 for name in _LAYER_COUNTS if name in settings}
    if layers:
        for name in _KIND_LISTS:
            if name in settings:
                settings[name] = (settings[name] * layers)[:layers]
        settings["num_hidden_layers"] = layers
    return settings
