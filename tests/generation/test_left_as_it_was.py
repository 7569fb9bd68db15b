"""After success, error and interruption, a model is as it was; and calls on one model at once stay apart."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import CompileConfig

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.attention import gate

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded", "prefix-auto")
# What Transformers keeps on a model that it has compiled.
COMPILED = {"_compiled_call", "_last_compile_config"}


def state_of(model):
    """Return all that is set on a model and its modules, in a form that can be compared."""
    found = {"config": model.config.to_dict(), "generation_config": model.generation_config.to_dict()}
    found["attention"] = model.config._attn_implementation
    for name, module in model.named_modules():
        held = {key for key in vars(module) if key not in COMPILED}
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and value}
        found[name] = (module.training, held, hooks, type(module), module.forward.__qualname__)
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = (parameter.requires_grad, parameter.data_ptr(), parameter._version)
    return found


def fail(error):
    def raise_it(*_):
        raise error

    return raise_it


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_model_is_as_it_was_after_success_error_and_interruption(name, strategy, tiny_model, monkeypatch):
    if strategy == "prefix-quantized":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    monkeypatch.setattr(gate, "_CROSSOVER", 1)
    model = tiny_model(name)
    prompts = torch.cat([tokens(1, 40).expand(3, -1), tokens(3, 4, seed=1)], dim=1)
    before, grad = state_of(model), torch.is_grad_enabled()
    generated(model, prompts, cache_implementation=strategy)
    assert state_of(model) == before
    for error in (KeyboardInterrupt(), RuntimeError("full disk")):
        with pytest.raises(type(error)):
            generated(model, prompts, cache_implementation=strategy, logits_processor=[fail(error)])
        assert state_of(model) == before
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    prefix = wrapped.prefill(prompts[0, :30])
    wrapped.forward(prompts[:, 30:], prefix=prefix)
    handle = model.lm_head.register_forward_hook(fail(KeyboardInterrupt()))
    for call in (
        lambda: wrapped.prefill(tokens(1, 30, seed=7)),
        lambda: wrapped.forward(prompts[:, 30:], prefix=prefix),
        lambda: generated(model, tokens(3, 20, seed=8), cache_implementation=strategy),
        lambda: hpc.loglikelihood(model, [([5, 6], [7])], progress=False),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
    handle.remove()
    hpc.loglikelihood(model, [([5, 6], [7]), ([5, 6], [8, 9])], progress=False)
    assert state_of(model) == before
    assert torch.is_grad_enabled() == grad
    plain = generated(model, prompts)
    if strategy != "prefix-quantized":
        assert torch.equal(generated(model, prompts, cache_implementation=strategy), plain)


@pytest.mark.slow
def test_a_compiled_call_leaves_nothing_but_what_transformers_keeps(tiny_model):
    model, compiling = tiny_model("llama"), CompileConfig(fullgraph=False, backend="eager", mode=None)
    compiling._compile_all_devices = True
    before = state_of(model)
    options = {"cache_implementation": "prefix-static", "compile_config": compiling, "max_cache_len": 32}
    generated(model, tokens(1, 5), max_new_tokens=2, **options)
    with pytest.raises(KeyboardInterrupt):
        generated(model, tokens(1, 5), logits_processor=[fail(KeyboardInterrupt())], **options)
    assert state_of(model) == before


def test_calls_of_several_threads_on_one_model_attend_shared_or_not_each_as_it_should(tiny_model, monkeypatch):
    monkeypatch.setattr(gate, "_CROSSOVER", 1)
    model, shared = tiny_model("llama"), tokens(1, 40)
    batches = [torch.cat([shared.expand(rows, -1), tokens(rows, 4, seed=rows)], dim=1) for rows in (2, 3, 4)]
    batches.append(tokens(3, 30, seed=9))
    expected = [generated(model, batch, max_new_tokens=16) for batch in batches]
    start = threading.Barrier(8)

    def run(index):
        start.wait()
        # Half of the threads make plain calls, which must not notice the others.
        options = {"cache_implementation": "prefix-dynamic"} if index % 2 else {}
        settings = {"do_sample": False, "max_new_tokens": 16, "suppress_tokens": [0]}
        return [model.generate(batches[index // 2], **settings, **options) for _ in range(2)]

    with ThreadPoolExecutor(8) as pool:
        for index, outputs in enumerate(pool.map(run, range(8))):
            assert all(torch.equal(output, expected[index // 2]) for output in outputs)
    hpc.store_for(model).sanity_check()
