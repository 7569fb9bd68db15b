"""More tiny random models, of the kinds that scoring has to tell apart."""

from collections.abc import Callable

from transformers import (
    Cohere2Config,
    FalconConfig,
    FalconMambaConfig,
    Gemma2Config,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
)

from tiny_models import COMMON, DECODER, MAX_POSITIONS, TINY_MODELS, WINDOW, build

ORIGINAL_MAX = 24  # where the rotary scaling of the scaled models changes


def gemma2() -> PreTrainedModel:
    """Build a Gemma 2: windows on every other layer, soft caps on attention and logits, so eager attention."""
    return build(Gemma2Config(**DECODER, sliding_window=WINDOW, query_pre_attn_scalar=8, final_logit_softcapping=5.0))


def mixtral() -> PreTrainedModel:
    """Build a Mixtral: a mixture of experts with windows."""
    return build(MixtralConfig(**DECODER, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2))


def cohere2() -> PreTrainedModel:
    """Build a Cohere 2: windows with rotary positions, full layers without any, scaled logits."""
    return build(Cohere2Config(**DECODER, sliding_window=WINDOW, logit_scale=0.25))


def opt() -> PreTrainedModel:
    """Build an OPT: learned positions with an offset."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    return build(OPTConfig(**COMMON, **sizes, num_attention_heads=4, max_position_embeddings=MAX_POSITIONS))


def phi3_longrope() -> PreTrainedModel:
    """Build a Phi 3 with longrope: other frequencies for rows past `ORIGINAL_MAX`."""
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": ORIGINAL_MAX,
    }
    return build(Phi3Config(**DECODER, rope_parameters=scaling, original_max_position_embeddings=ORIGINAL_MAX))


def falcon_alibi() -> PreTrainedModel:
    """Build a Falcon with ALiBi, whose sister with rotary positions is packed."""
    return build(FalconConfig(**COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True))


def mpt() -> PreTrainedModel:
    """Build an MPT: ALiBi by the order of rows."""
    return build(MptConfig(**COMMON, d_model=32, n_heads=4, n_layers=2, max_seq_len=MAX_POSITIONS))


def mamba() -> PreTrainedModel:
    """Build a Mamba: a running state that is wrong where several tokens follow a prefix."""
    return build(MambaConfig(**COMMON, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4))


def falcon_mamba() -> PreTrainedModel:
    """Build a Falcon Mamba, with the same defect."""
    return build(FalconMambaConfig(**COMMON, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4))


def mamba2() -> PreTrainedModel:
    """Build a Mamba 2: a running state that can be continued."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}
    return build(Mamba2Config(**COMMON, **sizes, chunk_size=16))


def jamba() -> PreTrainedModel:
    """Build a Jamba: running states and attention in turns."""
    sizes = {key: value for key, value in DECODER.items() if key != "head_dim"}
    hybrid = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return build(JambaConfig(**sizes, **hybrid, num_experts=2, mamba_d_state=8, use_mamba_kernels=False))


PACKED: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: TINY_MODELS[name] for name in ("llama", "qwen3", "gpt2", "gemma3_text", "mistral", "gpt_oss", "llama4")},
    "gemma2": gemma2,
    "mixtral": mixtral,
    "cohere2": cohere2,
    "opt": opt,
    "phi3_longrope": phi3_longrope,
}
NOT_PACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": TINY_MODELS["bloom"],
    "falcon_alibi": falcon_alibi,
    "mpt": mpt,
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "mamba2": mamba2,
    "jamba": jamba,
}
