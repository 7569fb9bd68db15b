"""Everything this package knows of Transformers' internals, checked when it is imported.

No other module reaches past Transformers' documented names. When a release moves something that is relied on here, the
import fails with `IncompatibleTransformersError`, which names what moved.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig

from .exceptions import IncompatibleTransformersError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CACHE_ARGUMENT",
    "DECODER_HOOKS",
    "LayerSpec",
    "attention_implementation",
    "cache_argument",
    "convolution_widths",
    "decoder_config",
    "drafts_from_tokens",
    "drops_cache",
    "forget_rotary_state",
    "generation_mixin",
    "keeps_index_positions",
    "keeps_padding_mask",
    "layer_class",
    "layer_specs",
    "name_lists",
    "original_max_positions",
    "output_cache",
    "refuse_cache_keyword",
    "takes_attention_interface",
    "takes_cache",
]

_GENERATION = "transformers.generation.utils"
_GENERATION_CONFIG = "transformers.generation.configuration_utils"

# The methods of `GenerationMixin` that registration wraps, with the parameters it passes on by name.
DECODER_HOOKS: dict[str, tuple[str, ...]] = {
    "generate": ("inputs", "generation_config"),
    "_prepare_cache_for_generation": (
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
    "_prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "_assisted_decoding": ("input_ids", "generation_config", "assistant_model"),
    "prepare_inputs_for_generation": ("input_ids", "next_sequence_length", "is_first_iteration"),
}

_RUNNING_KINDS = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})

# What configurations call the width of the convolution before a running state.
_CONVOLUTION_WIDTHS = (
    *("conv_kernel", "conv_kernel_size", "conv_L_cache", "d_conv", "linear_conv_kernel_dim", "mamba_d_conv"),
    *("mamba_conv_kernel", "short_conv_kernel_size", "conv1d_width"),
)

# Models whose configuration names a window that their masks know nothing of: they attend to every token.
_ATTENDS_FULLY = frozenset({"moshi"})

# The tuples that `GenerationConfig.validate` looks names up in: every name goes into the first, static ones into both.
_ALL_NAMES, _STATIC_NAMES = "ALL_CACHE_IMPLEMENTATIONS", "ALL_STATIC_CACHE_IMPLEMENTATIONS"


def _moved(name: str) -> IncompatibleTransformersError:
    return IncompatibleTransformersError(
        f"transformers {transformers.__version__} has no {name}, which hf-prefix-cache relies on; install a release "
        "that this version supports (transformers>=5.20,<6), or a newer hf-prefix-cache"
    )


def _lookup(module_name: str, name: str) -> Any:
    try:
        found: Any = import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _moved(f"{module_name}.{name}") from error
    return found


_get_layer_types_and_kwargs = _lookup("transformers.cache_utils", "get_layer_types_and_kwargs")
for _name in ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"):
    _lookup("transformers.cache_utils", _name)
_DynamicIndexedLayer = _lookup("transformers.cache_utils", "DynamicIndexedLayer")
_lookup("transformers.cache_utils", "StaticIndexedLayer")
for _name, _parameters in DECODER_HOOKS.items():
    _found = inspect.signature(_lookup(_GENERATION, f"GenerationMixin.{_name}")).parameters
    for _parameter in _parameters:
        if _parameter not in _found:
            raise _moved(f"{_GENERATION}.GenerationMixin.{_name}({_parameter})")
for _name in (_ALL_NAMES, _STATIC_NAMES):
    _lookup(_GENERATION_CONFIG, _name)

_PREPARE_INPUTS = inspect.signature(_lookup(_GENERATION, "GenerationMixin.prepare_inputs_for_generation")).parameters
if not {"cache", "past_key_values"} & set(_PREPARE_INPUTS):
    raise _moved(f"{_GENERATION}.GenerationMixin.prepare_inputs_for_generation(cache)")

CACHE_ARGUMENT: str = "cache" if "cache" in _PREPARE_INPUTS else "past_key_values"
"""The keyword by which ``forward`` and ``generate`` take a cache: ``cache`` from 5.24, before ``past_key_values``."""


class LayerSpec(NamedTuple):
    """What one layer of a model keeps.

    Attributes:
        kind: Transformers' layer type.
        window: Width of its window in tokens, where it has one.
        states: Running states of its own, where it has any.
        options: What Transformers makes its layer with.
    """

    kind: str
    window: int | None
    states: int = 1
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def has_running_state(self) -> bool:
        """Whether it keeps a running state (convolution, state space, linear attention)."""
        return self.kind in _RUNNING_KINDS


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text decoder's part of ``config``."""
    return config.get_text_config(decoder=True)


def layer_specs(config: PreTrainedConfig) -> list[LayerSpec]:
    """Return one `LayerSpec` for each layer of the decoder of ``config``."""
    config = decoder_config(config)
    if not hasattr(config, "num_hidden_layers"):
        return []  # several transformers in one: see `why_no_cache`
    kinds, options = _get_layer_types_and_kwargs(config)
    specs = [
        LayerSpec(kind, layer_options.get("sliding_window"), layer_options.get("number_of_states", 1), layer_options)
        for kind, layer_options in zip(kinds, options, strict=True)
    ]
    if config.model_type in _ATTENDS_FULLY:
        specs = [LayerSpec("full_attention", None)] * len(specs)
    specs += _repeated(config, specs)
    # Before 5.24, layers that read another layer's keys are left out of the list; from then on they are in it.
    return specs + [LayerSpec("dummy", None)] * (config.num_hidden_layers - len(specs))


def _repeated(config: PreTrainedConfig, specs: list[LayerSpec]) -> list[LayerSpec]:
    """Return what else models keep that run some layers several times, each time with a cache of its own."""
    if config.model_type != "dory" or config.recurrent_kv_cache_mode != "per_loop":
        return []
    start = config.n_input_layers
    return specs[start : start + config.n_recurrent_layers] * (config.n_recurrent_loops - 1)


def layer_class(kind: str) -> type | None:
    """Return the class of growing layers that Transformers, or a modeling file, has for layers of ``kind``."""
    classes: dict[str, type] = _lookup("transformers.cache_utils", "DYNAMIC_LAYER_TYPE_MAPPING")
    return classes.get(kind)


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return ``cache`` as keyword arguments for a model's ``forward`` or ``generate`` on this release."""
    return {CACHE_ARGUMENT: cache}


def output_cache(outputs: Any) -> Any:
    """Return the cache that a model's output holds, or None."""
    return outputs.get(CACHE_ARGUMENT)


def attention_implementation(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation that ``config`` selects."""
    return str(config._attn_implementation)


def keeps_index_positions() -> bool:
    """Return whether layers with an index hold its positions; before 5.21, models put them on the cache itself."""
    return hasattr(_DynamicIndexedLayer(), "indexer_position_ids")


def keeps_padding_mask(config: PreTrainedConfig) -> bool:
    """Return whether a static cache needs its padding mask even where nothing is padded (FlashAttention)."""
    return "flash" in attention_implementation(config)


def takes_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether ``model`` hands keys from its cache to Transformers' ``sdpa`` attention interface."""
    return bool(model._supports_attention_backend) and attention_implementation(decoder_config(model.config)) == "sdpa"


def takes_cache(model: PreTrainedModel) -> bool:
    """Return whether ``model`` takes a cache by the name `CACHE_ARGUMENT`; Mamba's own classes do from 5.24 on."""
    return CACHE_ARGUMENT in inspect.signature(model.forward).parameters


def drops_cache(model: PreTrainedModel) -> bool:
    """Return whether layers would silently run without the cache: those that checkpoint activations in training."""
    return model.training and any(
        module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


def generation_mixin() -> type:
    """Return the class whose methods every generating model inherits."""
    mixin: type = _lookup(_GENERATION, "GenerationMixin")
    return mixin


def name_lists() -> tuple[Any, Sequence[str]]:
    """Return the module that lists ``cache_implementation`` names, and the attributes: all names, static ones."""
    return import_module(_GENERATION_CONFIG), (_ALL_NAMES, _STATIC_NAMES)


def convolution_widths(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the widths of the convolutions before running states of ``config``, ascending."""
    settings = decoder_config(config).to_dict()
    found = {settings.get(name) for name in _CONVOLUTION_WIDTHS}
    return tuple(sorted({int(width) for width in found if isinstance(width, int) and width > 1}))


def original_max_positions(config: PreTrainedConfig) -> int | None:
    """Return the length at which the rotary scaling of ``config`` changes, or None where it never does.

    Dynamic NTK and longrope use other frequencies once a sequence is longer than this, for all of its tokens: keys
    computed on one side are wrong on the other.
    """
    config = decoder_config(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for entry in nested:
        if entry.get("rope_type") == "dynamic":
            return int(config.max_position_embeddings)
        if entry.get("rope_type") == "longrope":
            return int(entry["original_max_position_embeddings"])
    return None


def forget_rotary_state(model: PreTrainedModel) -> None:
    """Put frequencies that follow the sequence length back to those of short sequences, as in a fresh model.

    Dynamic NTK remembers the longest sequence it has seen, and computes later ones otherwise than a fresh model does.
    """
    if original_max_positions(model.config) is None:
        return
    for module in model.modules():
        for name, original in list(module.named_buffers(recurse=False)):
            if not name.endswith("original_inv_freq"):
                continue
            prefix = name.removesuffix("original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            if not torch.equal(current, original.to(current.device)):
                setattr(module, f"{prefix}inv_freq", original.to(current.device, copy=True))
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def drafts_from_tokens(generation_config: GenerationConfig, assistant_model: PreTrainedModel | None) -> bool:
    """Return whether assisted decoding makes its drafts from token ids alone, and not from the model's states."""
    if generation_config.prompt_lookup_num_tokens is not None:
        return True
    if getattr(generation_config, "use_mtp", None) or getattr(generation_config, "speculation_type", None):
        return False
    if assistant_model is None:
        return True
    usual: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(assistant_model.config), None)
    return type(assistant_model) is usual and "Assistant" not in usual.__name__


def refuse_cache_keyword(cache_class: type) -> None:
    """Before 5.24, make ``model(cache=...)`` raise: models there swallow the name silently and ignore the prefix."""
    if CACHE_ARGUMENT == "cache":
        return
    from transformers import PreTrainedModel  # not at import: it takes seconds

    if "__call__" in vars(PreTrainedModel):
        return
    module_call = PreTrainedModel.__call__

    def call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("cache"), cache_class):
            raise TypeError(
                f"transformers {transformers.__version__} ignores the keyword `cache`, so the prefix would be "
                "dropped silently; pass it as `past_key_values`"
            )
        return module_call(self, *args, **kwargs)

    PreTrainedModel.__call__ = call  # type: ignore[method-assign]
