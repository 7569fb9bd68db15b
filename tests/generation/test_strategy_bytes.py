"""What `choose_strategy` predicts is what caches turn out to hold, and whether decoding compiles decides."""

import pytest
import torch
from transformers import CompileConfig, MistralConfig

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument
from hf_prefix_cache.strategy import predicted_bytes
from tiny_models import DECODER, TINY_MODELS, build

ROWS, SHARED, OWN = 3, 150, 50
# A window of 8 tokens, as in the other tests, is not much more than the one token that its buffers have beside it.
MODELS = {**TINY_MODELS, "mistral": lambda: build(MistralConfig(**DECODER, sliding_window=64))}


def held_bytes(model, strategy, rows, shared):
    """Return the bytes of a cache in use: of a prompt in two forwards and then step by step, spare room included."""
    if strategy == "prefix-quantized":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    first, then = tokens(rows, SHARED - 20), tokens(rows, OWN)
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        if shared:
            model(tokens(1, SHARED), **cache_argument(cache))
            options = {"quantize_own": False} if strategy == "prefix-quantized" else {}
            if strategy == "prefix-static":
                options = {"max_cache_len": SHARED + OWN}
            cache = cache.snapshot().to_cache(strategy, batch_size=rows, **options)
        else:
            options = {"max_cache_len": SHARED + OWN} if strategy == "prefix-static" else {}
            kinds = {"prefix-static": hpc.PrefixStaticCache, "prefix-quantized": hpc.PrefixQuantizedCache}
            kinds["prefix-offloaded"] = hpc.PrefixOffloadedCache
            cache = kinds.get(strategy, hpc.PrefixDynamicCache)(config=model.config, **options)
            model(first, **cache_argument(cache))
            model(tokens(rows, 20), **cache_argument(cache))
        model(then[:, :-3], **cache_argument(cache))
        for column in then[:, -3:].split(1, dim=1):
            model(column, **cache_argument(cache))
    return cache.nbytes


@pytest.mark.parametrize("shared", [0, SHARED], ids=["rows of their own", "rows on one prefix"])
@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_are_within_a_tenth_of_those_that_a_cache_in_use_holds(name, strategy, shared):
    if name == "bloom" and strategy == "prefix-static":
        pytest.skip("Bloom generates on static caches from some release on only")
    model = MODELS[name]()
    sizes = {"tokens": SHARED + OWN, "batch_size": ROWS, "dtype": torch.float32, "shared_tokens": shared}
    predicted = predicted_bytes(model.config, device=torch.device("cpu"), **sizes)[strategy]
    assert held_bytes(model, strategy, ROWS, shared) == pytest.approx(predicted, rel=0.1)
    choice = hpc.choose_strategy(model, tokens=SHARED + OWN, batch_size=ROWS)
    assert shared or choice.predictions[strategy] == predicted


def test_few_rows_on_a_short_prefix_hold_it_each_as_generate_does(tiny_model):
    model, prompts = tiny_model("llama"), torch.cat([tokens(1, 60).expand(3, -1), tokens(3, 4, seed=1)], dim=1)
    choice = hpc.choose_strategy(model, tokens=72, batch_size=3, shared_tokens=60)
    output = generated(
        model, prompts, cache_implementation="prefix-dynamic", max_new_tokens=9, return_dict_in_generate=True
    )
    assert output[CACHE_ARGUMENT].nbytes == pytest.approx(choice.predicted_bytes, rel=0.1)


def test_rows_on_one_prefix_fit_where_repeated_ones_do_not(tiny_model, monkeypatch):
    model = tiny_model("llama")
    needed = hpc.choose_strategy(model, tokens=200, batch_size=8, shared_tokens=150).predicted_bytes
    monkeypatch.setattr("hf_prefix_cache.strategy.free_bytes", lambda device: needed)
    choice = hpc.choose_strategy(model, tokens=200, batch_size=8, shared_tokens=150, compiles=True)
    assert choice.strategy == "prefix-dynamic"
    assert "static buffers would take" in str(choice)
    with pytest.raises(hpc.CacheCapacityError):
        hpc.choose_strategy(model, tokens=200, batch_size=8)
    with pytest.raises(hpc.InputMismatchError, match="shared_tokens is 201"):
        hpc.choose_strategy(model, tokens=200, batch_size=8, shared_tokens=201)


def test_where_decoding_is_compiled_on_a_cpu_auto_takes_static_shapes(tiny_model):
    model, compiling = tiny_model("llama"), CompileConfig(fullgraph=False, backend="eager", mode=None)
    compiling._compile_all_devices = True
    assert hpc.choose_strategy(model, tokens=100, compiles=True).strategy == "prefix-static"
    prompt = tokens(1, 9)
    output = generated(model, prompt, cache_implementation="prefix-auto", compile_config=compiling, max_new_tokens=1)
    assert torch.equal(output, generated(model, prompt, max_new_tokens=1))
    assert hpc.last_report(model).strategy == "prefix-static"
    generated(model, prompt, cache_implementation="prefix-auto", max_new_tokens=1)
    assert hpc.last_report(model).strategy == "prefix-dynamic"
