"""What no rule tells of single architectures: which are wrong behind a prefix, and how they skip padding.

Each entry was found by comparing tiny random models with their uncached forwards (tests/zoo).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import transformers
from transformers import PreTrainedConfig

from .compat import CACHE_ARGUMENT, decoder_config, keeps_index_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "masks_all_places",
    "positions_follow_mask",
    "positions_from_padding_id",
    "resumes_in_one_call",
    "runs_on_static_caches",
    "why_no_cache",
    "why_no_static_cache",
]

# ALiBi models without `position_ids` whose biases count over the attention mask.
_POSITIONS_FROM_MASK = frozenset({"bloom"})
# Models with windows that their configuration does not tell, and that padding shifts.
_OWN_WINDOWS = frozenset({"gpt_neo"})
# Models whose positions start behind the id of their padding token, not at 0.
_POSITIONS_FROM_PADDING_ID = frozenset(
    {
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)

# Models whose running state continues exactly when several tokens follow it in one forward. Others (Mamba,
# Falcon-Mamba and Jamba, measured) start their scan from zero then, and are right only one token at a time.
_RESUMES = frozenset(
    {
        *("bailing_hybrid", "falcon_h1", "granitemoehybrid", "inkling_text", "kimi_linear", "lara_mini", "lfm2"),
        *("lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "zaya",
    }
)

# Models that are wrong on buffers of a fixed size, and why.
_KEYS_COUNT = "its masks or biases are made for as many keys as there are tokens, and not for those of a buffer"
_WRONG_ON_BUFFERS = {
    **dict.fromkeys(("gpt_neo", "inkling2_loop_text", "inkling2_text", "inkling_text"), _KEYS_COUNT),
    "moshi": "its generate makes masks with a window there, and its forward has none",
}

# Models whose index needs the positions of all tokens, which they put on the cache itself in some releases.
_INDEXES_POSITIONS = frozenset({"qwen4_exp", "qwen4_exp_text"})

# Models that limit time steps in the scan of a whole text, and not in the step of a single token.
_STEPS_WITHOUT_LIMIT = frozenset({"nemotron_h", "zamba2"})

# Models that are wrong behind a cached prefix however it is fed, in plain Transformers too, and why.
_BOTH_WAYS = (
    "its tokens also attend to those behind them, so that a prefix is not the same before another suffix; use "
    "Transformers as it is, or hpc.loglikelihood, which scores it row by row"
)
_WRONG_BEHIND_A_PREFIX = {
    "bamba": (
        "its forward counts positions from 0 behind a cached prefix, in plain Transformers too; use Transformers as "
        "it is, whose generate passes position_ids"
    ),
    "blt": "it reads bytes in patches, and keeps caches of three transformers; use Transformers as it is",
    "cpmant": _BOTH_WAYS,
    "git": "it takes every cached prefix for one that begins with an image; use Transformers as it is",
    "prophetnet": _BOTH_WAYS,
    "recurrent_gemma": "it keeps its running states in its modules and not in the cache; use Transformers as it is",
    "unlimited_ocr_text": (
        "what its windows keep depends on where the prompt ended, so that a prefix is not the same in two prompts; "
        "use Transformers as it is"
    ),
    "xlm": "its masks are made for the new tokens alone; use Transformers as it is",
    "xlnet": _BOTH_WAYS,
}


def why_no_cache(config: PreTrainedConfig) -> str:
    """Return why models of ``config`` keep no `Cache` of Transformers, in words, or an empty string."""
    if config.model_type in _WRONG_BEHIND_A_PREFIX:
        return _WRONG_BEHIND_A_PREFIX[config.model_type]
    if config.model_type in _STEPS_WITHOUT_LIMIT and getattr(config, "time_step_min", 0) > 0:
        return (
            f"time_step_min is {config.time_step_min}, and its decoding step leaves that limit out, in plain "
            "Transformers too, so that single tokens behind a prefix differ from the uncached model; use Transformers "
            "as it is, or hpc.loglikelihood, which scores it row by row"
        )
    if config.model_type in _INDEXES_POSITIONS and not keeps_index_positions():
        return (
            "it keeps positions beside its layers on this Transformers release, where forks and crops do not reach "
            "them; install transformers>=5.21, or use hpc.loglikelihood, which scores it row by row"
        )
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:  # a class of the user's own
        return ""
    parameters = inspect.signature(model_class.forward).parameters
    takes_one = CACHE_ARGUMENT in parameters
    if not takes_one and "cache_params" in parameters:
        return (
            f"{model_class.__name__} takes its cache by a name of its own on this Transformers release; install "
            "transformers>=5.24, or use hpc.loglikelihood, which scores it row by row"
        )
    if not takes_one or not getattr(model_class, "_supports_default_dynamic_cache", lambda: True)():
        return (
            f"{model_class.__name__} keeps its state outside of Transformers' Cache on this release; use "
            "Transformers as it is, or hpc.loglikelihood, which then scores row by row"
        )
    return ""


def why_no_static_cache(config: PreTrainedConfig) -> str:
    """Return why models of ``config`` are wrong on buffers of a fixed size, in words, or an empty string."""
    return _WRONG_ON_BUFFERS.get(decoder_config(config).model_type, "")


def positions_follow_mask(config: PreTrainedConfig) -> bool:
    """Return whether models of ``config`` can skip padding: by ``position_ids`` from 0, or by counting the mask."""
    if config.model_type in _POSITIONS_FROM_MASK:
        return True
    if config.model_type in _OWN_WINDOWS:
        return False
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return True
    takes_them = "position_ids" in inspect.signature(model_class.forward).parameters
    return takes_them and config.model_type not in _POSITIONS_FROM_PADDING_ID


def positions_from_padding_id(config: PreTrainedConfig) -> bool:
    """Return whether models of ``config`` count positions from behind their padding id; ``generate`` does from 0."""
    return config.model_type in _POSITIONS_FROM_PADDING_ID


def masks_all_places(config: PreTrainedConfig) -> bool:
    """Return whether models of ``config`` make masks of all places of a buffer by themselves: Bloom does."""
    return decoder_config(config).model_type in _POSITIONS_FROM_MASK


def runs_on_static_caches(model: PreTrainedModel) -> bool:
    """Return whether ``generate`` of ``model`` works on static caches: Bloom's not before it makes masks itself."""
    return model.config.model_type not in _POSITIONS_FROM_MASK or "create_masks_for_generate" in vars(type(model))


def resumes_in_one_call(config: PreTrainedConfig) -> bool:
    """Return whether models of ``config`` with running states take several tokens behind a prefix in one forward."""
    return config.model_type in _RESUMES
