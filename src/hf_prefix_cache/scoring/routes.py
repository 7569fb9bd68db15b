"""Which way of scoring is exact for a model: packing is an allow-list, everything else takes a slower exact route."""

from typing import Any, NamedTuple

from ..architectures import resumes_in_one_call
from ..caches import PrefixDynamicCache
from ..compat import CACHE_ARGUMENT, attention_implementation, decoder_config, layer_specs
from ..exceptions import UnsupportedLayerError, UnsupportedModelError
from .masks import MASKED_IMPLEMENTATIONS
from .model_access import forward_accepts, uses_virtual_tokens
from .tree_cache import PATH_LAYERS

__all__ = ["PACKED_MODEL_TYPES", "Route", "choose_route", "forking_obstacle", "packing_obstacle"]

PACKED_MODEL_TYPES = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2 cohere2_moe
    ctrl cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon
    flex_olmo flint gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3
    minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert-decoder nanochat nemotron olmo olmo2
    olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Architectures whose packed scores equal plain ones, short and past every threshold of their configuration.

Compared as tiny random models with every attention implementation they have and with chunks of several sizes; a
composite model is on the list under its own type and its text decoder's.
"""


class Route(NamedTuple):
    """A way of scoring and the reason for it, in words."""

    name: str
    reason: str


def choose_route(model: Any) -> Route:
    """Return the fastest route that is exact for ``model``."""
    obstacle = packing_obstacle(model)
    if obstacle is None:
        return Route("packed", "every layer is attention that a mask over depths describes")
    if forking_obstacle(model) is None:
        return Route("forked", f"not packed because {obstacle}")
    return Route("rows", f"not packed because {obstacle}; not forked because {forking_obstacle(model)}")


def forking_obstacle(model: Any) -> str | None:
    """Return why forks of a cache would not be exact for ``model``, or None if they are."""
    if not forward_accepts(model, CACHE_ARGUMENT):
        return "its forward takes no cache"
    if uses_virtual_tokens(model):
        return "PEFT puts learned tokens before every input"
    has_running_state = any(spec.has_running_state for spec in layer_specs(model.config))
    if has_running_state and not resumes_in_one_call(decoder_config(model.config)):
        return "it computes several tokens behind a prefix wrongly"
    try:
        PrefixDynamicCache(config=model.config)
    except (UnsupportedLayerError, UnsupportedModelError) as error:
        return str(error)
    return None


def packing_obstacle(model: Any) -> str | None:
    """Return why the packed tree would not be exact for ``model``, or None if it is."""
    decoder = decoder_config(model.config)
    kinds = {spec.kind for spec in layer_specs(model.config)} - PATH_LAYERS
    implementation = attention_implementation(decoder)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder"
    if kinds:
        return f"its layers of kind {', '.join(sorted(kinds))} keep a state that no mask can branch"
    for model_type in (model.config.model_type, decoder.model_type):
        if model_type not in PACKED_MODEL_TYPES:
            return f"{model_type} is not among the architectures verified for packing"
    if not getattr(decoder, "is_causal", True) or getattr(decoder, "use_bidirectional_attention", None) is True:
        return "its tokens also attend to those behind them"
    if getattr(decoder, "alibi", False):
        return "its position biases (ALiBi) follow the order of rows, not position_ids"
    if implementation not in MASKED_IMPLEMENTATIONS:
        return f"its attention implementation {implementation} takes no arbitrary mask"
    if not forward_accepts(model, "position_ids") or not forward_accepts(model, "logits_to_keep"):
        return "its forward takes no position_ids or no logits_to_keep"
    if uses_virtual_tokens(model):
        return "PEFT puts learned tokens before every input"
    return None
