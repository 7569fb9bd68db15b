"""Tiny random models with running states: state space, convolution, linear attention, and hybrids of them."""

from collections.abc import Callable

import transformers as tf
from transformers import PreTrainedModel

from tiny_models import build

_SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
_ATTENTION = {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}

RECURRENT_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mamba": lambda: build(tf.MambaConfig(**_SIZES, state_size=8)),
    "falcon_mamba": lambda: build(tf.FalconMambaConfig(**_SIZES, state_size=8)),
    "mamba2": lambda: build(
        tf.Mamba2Config(**_SIZES, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
    ),
    "jamba": lambda: build(
        tf.JambaConfig(
            **_SIZES,
            **_ATTENTION,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        )
    ),
    "falcon_h1": lambda: build(tf.FalconH1Config(**_SIZES, **_ATTENTION, **_MIXER, mamba_d_ssm=64)),
    "lfm2": lambda: build(
        tf.Lfm2Config(**_SIZES, **_ATTENTION, conv_L_cache=3, layer_types=["conv", "full_attention"])
    ),
    "qwen3_next": lambda: build(
        tf.Qwen3NextConfig(
            **{**_SIZES, "num_hidden_layers": 4},
            **_ATTENTION,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        )
    ),
}
"""Makes each model, in evaluation mode, with equal weights at every call."""
