"""Compiled decoding on the CPU: prefixes go through one graph, and the dynamic strategy is never compiled."""

import pytest
import torch
from transformers import CompileConfig

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens

pytestmark = pytest.mark.slow


def everywhere(backend="eager"):
    """Return a configuration that compiles on the CPU too, which Transformers allows as an attribute only."""
    config = CompileConfig(fullgraph=False, backend=backend, mode=None, dynamic=False)
    config._compile_all_devices = True
    return config


@pytest.fixture
def graphs():
    """Count the graphs that are compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_prefixes_and_prompts_of_any_length_go_through_the_same_graphs(tiny_model, graphs):
    model = tiny_model("llama")
    options = {"cache_implementation": "prefix-static", "max_cache_len": 64, "compile_config": everywhere()}
    first = generated(model, tokens(1, 12), **options)
    assert torch.equal(first, generated(model, tokens(1, 12)))
    compiled = graphs()
    assert compiled > 0
    following = torch.cat([first, tokens(1, 5, seed=1)], dim=1)
    for prompt in (tokens(1, 12), following, tokens(1, 17, seed=2), tokens(1, 9, seed=3), following[:, :14]):
        assert torch.equal(generated(model, prompt, **options), generated(model, prompt))
    assert hpc.last_report(model).reused_tokens == 13
    assert graphs() == compiled


def test_windows_take_no_more_graphs_than_in_transformers(tiny_model, graphs):
    """Transformers' own static windows compile for every length at which they step, and so do ours."""
    model, counts = tiny_model("mistral"), []
    for name in ("static", "prefix-static"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {"cache_implementation": name, "max_cache_len": 64, "compile_config": everywhere()}
        for prompt in (tokens(1, 12), torch.cat([tokens(1, 12), tokens(1, 5, seed=1)], dim=1)):
            output = generated(model, prompt, max_new_tokens=3, **options)
            assert torch.equal(output, generated(model, prompt, max_new_tokens=3))
        counts.append(graphs())
    assert hpc.last_report(model).reused_tokens == 12
    assert counts[1] <= counts[0]


def test_a_longer_call_keeps_its_length_for_later_ones(tiny_model, graphs):
    model = tiny_model("llama")
    options = {"cache_implementation": "prefix-static", "compile_config": everywhere()}
    generated(model, tokens(1, 12), max_new_tokens=30, **options)
    compiled = graphs()
    for new in (3, 20, 29):
        assert torch.equal(
            generated(model, tokens(1, 12), max_new_tokens=new, **options),
            generated(model, tokens(1, 12), max_new_tokens=new),
        )
    assert graphs() == compiled


def test_a_restored_cache_of_the_caller_goes_through_one_graph(tiny_model, graphs):
    model, cache_argument = tiny_model("llama"), hpc.compat.cache_argument
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=64)
    prefixes = [hpc.PrefixCachedModel(model).prefill(tokens(1, length, seed=length)) for length in (11, 17)]
    compiled = []
    for prefix in (*prefixes, *prefixes):
        cache.restore(prefix)
        addresses = [tensor.data_ptr() for tensor in cache.tensors]
        prompt = torch.cat([prefix.input_ids, tokens(1, 3)], dim=1)
        output = generated(model, prompt, compile_config=everywhere(), **cache_argument(cache))
        assert torch.equal(output, generated(model, prompt))
        assert [tensor.data_ptr() for tensor in cache.tensors] == addresses
        compiled.append(graphs())
    assert compiled[0] == compiled[-1] > 0


def test_the_dynamic_strategy_is_never_compiled(tiny_model, graphs):
    for name in ("llama", "mistral", "gpt2"):
        model, prompt = tiny_model(name), tokens(1, 12)
        for reuse in range(2):
            output = generated(
                model, prompt, cache_implementation="prefix-dynamic", compile_config=everywhere(), prefill_chunk_size=5
            )
            assert torch.equal(output, generated(model, prompt, prefill_chunk_size=5))
            del reuse
    assert graphs() == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, inside
def test_with_the_compiler_itself(tiny_model, graphs):
    model = tiny_model("llama")
    options = {"cache_implementation": "prefix-static", "max_cache_len": 64, "compile_config": everywhere("inductor")}
    for prompt in (tokens(1, 12), tokens(1, 20, seed=1), tokens(1, 12)):
        assert torch.equal(generated(model, prompt, **options), generated(model, prompt))
    assert hpc.last_report(model).reused_tokens == 11
    assert graphs() > 0
