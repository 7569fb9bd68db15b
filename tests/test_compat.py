"""What is relied on of Transformers, and what happens where it has moved."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma3nTextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    RobertaConfig,
)

import hf_prefix_cache as hpc
from hf_prefix_cache import architectures, compat
from hf_prefix_cache.exceptions import IncompatibleTransformersError
from tiny_models import TINY_MODELS

# What a later release may take away (object, attribute, what is left of it), and the name that the error then shows.
MOVED = {
    "transformers.cache_utils.get_layer_types_and_kwargs": "cache_utils get_layer_types_and_kwargs None",
    "transformers.cache_utils.DynamicSlidingWindowLayer": "cache_utils DynamicSlidingWindowLayer None",
    "transformers.generation.utils.GenerationMixin._prefill": "utils.GenerationMixin _prefill None",
    "transformers.generation.utils.GenerationMixin._prefill(input_ids)": (
        "utils.GenerationMixin _prefill lambda self, generation_config, model_kwargs, is_first_iteration: None"
    ),
    "transformers.generation.configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS": (
        "configuration_utils ALL_STATIC_CACHE_IMPLEMENTATIONS None"
    ),
}
SCRIPT = """
import json, sys
from transformers import cache_utils
from transformers.generation import configuration_utils, utils

found = {}
for name, change in json.loads(sys.argv[1]).items():
    holder, attribute, left = change.split(" ", 2)
    holder, left = eval(holder), eval(left)
    original = getattr(holder, attribute)
    setattr(holder, attribute, left) if left else delattr(holder, attribute)
    try:
        import hf_prefix_cache.compat
    except ImportError as error:
        found[name] = f"{type(error).__name__}: {error}"
    setattr(holder, attribute, original)
    for module in [module for module in sys.modules if module.startswith("hf_prefix_cache")]:
        del sys.modules[module]
print(json.dumps(found))
"""


def test_a_name_that_has_moved_is_named_when_the_package_is_imported():
    command = [sys.executable, "-c", SCRIPT, json.dumps(MOVED)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert found.keys() == MOVED.keys()
    for name, message in found.items():
        version = f"transformers {transformers.__version__}"
        assert message.startswith(f"{IncompatibleTransformersError.__name__}: {version} has no {name}, ")
        assert "install a release" in message


def test_the_keyword_for_caches_is_the_one_that_models_take():
    parameters = inspect.signature(type(TINY_MODELS["llama"]()).forward).parameters
    assert compat.CACHE_ARGUMENT in parameters
    assert ("cache" in parameters) == (compat.CACHE_ARGUMENT == "cache")


def test_the_cache_comes_back_in_the_output():
    model = TINY_MODELS["llama"]()
    cache = hpc.PrefixDynamicCache(config=model.config)
    outputs = model(input_ids=torch.tensor([[1, 2]]), **compat.cache_argument(cache))
    assert compat.output_cache(outputs) is cache


@pytest.mark.skipif(compat.CACHE_ARGUMENT == "cache", reason="models take the keyword `cache` on this release")
def test_the_keyword_cache_raises_where_models_would_ignore_it():
    model = TINY_MODELS["llama"]()
    cache = hpc.PrefixDynamicCache(config=model.config)
    for call in (model, model.model):
        with pytest.raises(TypeError, match="past_key_values"):
            call(input_ids=torch.tensor([[1, 2]]), cache=cache)
    assert cache.seq_length == 0
    assert model(input_ids=torch.tensor([[1, 2]]), past_key_values=cache).logits.shape == (1, 2, 99)
    with pytest.raises((TypeError, ValueError), match="cache"):
        model.generate(input_ids=torch.tensor([[1, 2]]), cache=cache, max_new_tokens=2)


@pytest.mark.skipif(compat.CACHE_ARGUMENT != "cache", reason="models ignore the keyword `cache` on this release")
def test_calls_of_models_are_left_alone_where_they_take_the_keyword_cache():
    assert "__call__" not in vars(transformers.PreTrainedModel)


def test_each_layer_s_kind_and_window_are_known():
    def specs(config):
        return [spec[:3] for spec in compat.layer_specs(config)]

    assert specs(LlamaConfig(num_hidden_layers=2)) == [("full_attention", None, 1)] * 2
    assert specs(MistralConfig(num_hidden_layers=1, sliding_window=7)) == [("sliding_attention", 7, 1)]
    chunked = Llama4TextConfig(num_hidden_layers=2, no_rope_layers=[1, 0], attention_chunk_size=7)
    assert specs(chunked) == [("chunked_attention", 7, 1), ("full_attention", None, 1)]


def test_layers_that_read_another_layer_s_keys_are_counted_on_every_release():
    config = Gemma3nTextConfig(
        num_hidden_layers=4, layer_types=["full_attention"] * 4, num_kv_shared_layers=2, intermediate_size=8
    )
    assert [spec.kind for spec in compat.layer_specs(config)] == ["full_attention"] * 2 + ["dummy"] * 2


def test_the_length_at_which_rotary_scaling_changes_is_known():
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert compat.original_max_positions(LlamaConfig(rope_parameters=plain)) is None
    assert compat.original_max_positions(LlamaConfig(rope_parameters=dynamic, max_position_embeddings=64)) == 64
    factors = [1.0] * 48
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    phi = Phi3Config(rope_parameters=longrope, original_max_position_embeddings=32, max_position_embeddings=128)
    assert compat.original_max_positions(phi) == 32


@pytest.mark.parametrize(
    ("config", "follow"),
    [
        (LlamaConfig(), True),
        (GPT2Config(), True),
        (BloomConfig(), True),
        (DeepseekV3Config(), True),
        (MptConfig(), False),
        (RobertaConfig(), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_whose_positions_cannot_skip_padding_are_known(config, follow):
    assert architectures.positions_follow_mask(config) == follow
