"""The choice of a strategy explains itself and counts its bytes as they turn out to be."""

import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.strategy import cache_bytes
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("length", [5, 30])
def test_predicted_bytes_are_those_that_a_cache_holds(name, length, tiny_model):
    model = tiny_model(name)
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(3, length), **hpc.compat.cache_argument(cache))
    assert (
        cache_bytes(model.config, tokens=length, batch_size=3, dtype=torch.float32)
        == cache.snapshot().compact().nbytes
    )


def test_on_the_cpu_the_dynamic_strategy_is_chosen_and_says_why(tiny_model):
    choice = hpc.choose_strategy(tiny_model("llama"), tokens=100, batch_size=2)
    assert choice.strategy == "prefix-dynamic"
    assert choice.predicted_bytes == 2 * 2 * 100 * 2 * 2 * 8 * 4  # keys and values, rows, tokens, layers, heads, width
    assert choice.free_bytes > choice.predicted_bytes
    assert "2 x 100 tokens take 0.1 MB" in choice.reasons[0]
    assert str(choice).startswith("prefix-dynamic (0.1 MB): 2 x 100 tokens")
    assert "does not compile on the CPU" in str(choice)


def test_without_a_length_the_model_is_taken_at_its_longest(tiny_model):
    model = tiny_model("llama")
    assert hpc.choose_strategy(model).predicted_bytes == hpc.choose_strategy(model, tokens=256).predicted_bytes


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let models say that they are on a GPU with 1 GB free."""
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: 10**9)


def test_where_decoding_compiles_static_shapes_are_chosen(on_a_gpu, tiny_model):
    choice = hpc.choose_strategy(tiny_model("llama"), tokens=100)
    assert choice.strategy == "prefix-static"
    assert "compiles for static shapes on cuda" in str(choice)


def test_what_speaks_against_static_shapes_is_said(on_a_gpu, tiny_model):
    model = tiny_model("llama")
    assert "guesswork" in str(hpc.choose_strategy(model))
    model.hf_device_map = {"model": 0, "lm_head": 1}
    choice = hpc.choose_strategy(model, tokens=100)
    assert choice.strategy == "prefix-dynamic"
    assert "spread over devices" in str(choice)
    model.hf_device_map = {"": 0}
    assert hpc.choose_strategy(model, tokens=100).strategy == "prefix-static"


def test_what_fits_nowhere_is_refused(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(hpc.CacheCapacityError, match=r"1 x 1000000000000 tokens take .* MB are free.*pass fewer rows"):
        hpc.choose_strategy(model, tokens=10**12)
    with pytest.raises(hpc.CacheCapacityError):
        generated(model, tokens(1, 4), cache_implementation="prefix-auto", max_new_tokens=10**12)
    for options in ({"tokens": 0}, {"tokens": -5}, {"batch_size": 0}):
        with pytest.raises(hpc.InputMismatchError, match="both are 1 or more"):
            hpc.choose_strategy(model, **options)


def test_auto_in_generate_names_what_it_chose(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 10)
    for reused in (0, 9):
        output = generated(model, prompt, cache_implementation="prefix-auto")
        assert torch.equal(output, generated(model, prompt))
        assert (hpc.last_report(model).strategy, hpc.last_report(model).reused_tokens) == ("prefix-dynamic", reused)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_running_states_gain_nothing_from_static_shapes(name, on_a_gpu):
    choice = hpc.choose_strategy(RECURRENT_MODELS[name](), tokens=100)
    assert choice.strategy == "prefix-dynamic"
    assert "running states" in str(choice)


def test_no_strategy_is_chosen_for_a_model_that_none_serves_exactly():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(hpc.UnsupportedModelError, match="EncoderDecoderCache"):
        hpc.choose_strategy(model, tokens=10)
