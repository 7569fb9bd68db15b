"""Tiny random causal language models, one for each architecture the tests speak of.

They are float32, in evaluation mode, seeded, and initialised widely enough that logits differ by whole numbers, so
that a comparison within 1e-4 tells a wrong prefix from a right one. Add an architecture by adding a builder to
`TINY_MODELS`.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB_SIZE = 99
MAX_POSITIONS = 256
WINDOW = 8

# No end-of-sequence token: a random model would otherwise stop early and compare fewer tokens than a test asks for.
# Untied embeddings: tied ones make a random model repeat its last token, whatever came before.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
DECODER: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
}


def build(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Build the model of a config with seeded weights, leaving the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def llama() -> PreTrainedModel:
    """Build a Llama: full attention, grouped key-value heads, rotary positions."""
    return build(LlamaConfig(**DECODER))


def qwen3() -> PreTrainedModel:
    """Build a Qwen 3: full attention with normalised queries and keys."""
    return build(Qwen3Config(**DECODER))


def gpt2() -> PreTrainedModel:
    """Build a GPT-2: full attention, learned absolute positions."""
    return build(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_POSITIONS))


def bloom() -> PreTrainedModel:
    """Build a Bloom: full attention, ALiBi biases instead of positions."""
    # A seed whose greedy text varies: ALiBi decays fast, and most seeds repeat one token.
    return build(BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4), seed=2)


def gemma3_text() -> PreTrainedModel:
    """Build a Gemma 3 text model: one windowed and one full layer, each with rotary settings of its own."""
    return build(
        Gemma3TextConfig(
            **DECODER,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def mistral() -> PreTrainedModel:
    """Build a Mistral: every layer windowed."""
    return build(MistralConfig(**DECODER, sliding_window=WINDOW))


def gpt_oss() -> PreTrainedModel:
    """Build a GPT-OSS: attention sinks, a mixture of experts, one windowed and one full layer."""
    return build(
        GptOssConfig(
            **DECODER,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_POSITIONS // 4,
            },
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def llama4() -> PreTrainedModel:
    """Build a Llama 4 text model: one chunked layer with rotary positions and one full layer without positions."""
    return build(
        Llama4TextConfig(
            **DECODER,
            intermediate_size_mlp=64,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            attention_chunk_size=WINDOW,
        )
    )


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bloom": bloom,
    "gemma3_text": gemma3_text,
    "mistral": mistral,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
}
