"""What single architectures need to be tiny, and why some are not built."""

from typing import Any

from .shrink import WINDOW

__all__ = ["NOT_BUILT", "OVERRIDES"]

_LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
_SWITCHED_ON = {"layer_types": _SLIDING_AND_FULL, "use_sliding_window": True, "sliding_window": WINDOW}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
_SHARED_KEYS = {"layer_types": _SLIDING_AND_FULL, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
_DOTS3 = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "shared_experts_intermediate_size": 16,
}
_INKLING2 = {
    "unpadded_vocab_size": 99,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 32,
    "log_scaling_n_floor": 16,
}
_QWEN4 = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 99,
    "make_ngram_vocab_size_divisible_by": 1,
    "split_ngram_parts": 1,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 99,
        "patch_in_forward": False,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": {
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {"sliding_attention": _ROTARY, "full_attention": _ROTARY},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"layer_types": _SLIDING_AND_FULL},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8},
    },
    "dots3_note_text": _DOTS3,
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": _SHARED_KEYS,
    "gemma4_unified": {
        "vision_config": {"mm_posemb_size": 16, "mm_embed_dim": 32, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 32},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL, "num_hidden_layers": 4, "shared_intermediate_size": 16},
    # It runs its layers in cycles, which would make rounding grow to 5e-3.
    "hrm_text": {"initializer_range": 0.1},
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": _INKLING2,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kolibri1_1": {
        "head_dim": 16,
        "num_attention_heads": 4,
        "layer_types": ["sliding_attention", "indexed_attention"] * 2,
        "index_topk": 4,
        "index_pool_size": 8,
        "index_compression": 2,
        "index_num_heads": 2,
        "index_num_local_tokens": 2,
        "index_num_sink_tokens": 1,
    },
    "laguna": {"layer_types": _SLIDING_AND_FULL},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mellum": {"layer_types": _SLIDING_AND_FULL},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 3,
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 32},
        "audio_config": {
            "num_blocks": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen2": _SWITCHED_ON,
    "qwen2_moe": _SWITCHED_ON,
    "qwen3": _SWITCHED_ON,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    # In many small pieces rounding grows to 1e-3 otherwise, in plain Transformers to the last bit the same.
    "qwen3_next": {"initializer_range": 0.1},
    "reformer": {
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "hash_seed": 0,
        "local_attn_chunk_length": WINDOW,
        "lsh_attn_chunk_length": WINDOW,
    },
    # Its logits are so large that rounding alone comes to 2e-4.
    "rembert": {"initializer_range": 0.1},
    "roc_bert": {
        "pronunciation_vocab_size": 99,
        "pronunciation_embed_dim": 32,
        "shape_vocab_size": 99,
        "shape_embed_dim": 32,
    },
    "smollm3": _SWITCHED_ON,
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "num_key_value_heads": 4},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
        "initializer_range": 0.1,  # rounding comes to 2e-4 otherwise
    },
}
"""Settings where the usual sizes do not fit together, or where they leave out a kind of layer."""

_AUDIO_CODES = "its class takes the configuration of its decoder alone, and codes of audio in place of tokens"
_DRAFTER = "it drafts for another model, whose keys and values it reads; on its own it computes nothing"
NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs the package timm; its text decoder is gemma3n_text",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": _AUDIO_CODES,
    "musicgen_melody": _AUDIO_CODES,
}
"""Architectures that are not built, with the reason."""
