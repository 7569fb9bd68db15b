"""What users of other projects have reported of adapters, training, memory and saved state, and how it is here.

The numbers are those of huggingface/transformers (tf) and of others where named.
"""

import ast
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import hf_prefix_cache as hpc
import saved_prefixes
from hf_prefix_cache.compat import cache_argument
from saved_prefixes import continuation, make_prefix
from tiny_models import build, llama

# What PEFT asks of Transformers has another name from 5.24 on.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PROMPT = torch.arange(5, 45)[None]


def generated(model, **options):
    return model.generate(PROMPT, max_new_tokens=6, do_sample=False, **options)


def with_adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    return model.eval()


def test_vllm_42125_3264_llama_cpp_26207_peft_2523_state_of_one_adapter_is_never_used_under_another():
    model = with_adapters()
    inner = model.base_model.model

    def off():
        model.base_model.disable_adapter_layers()

    def on(name):
        model.base_model.enable_adapter_layers()
        model.set_adapter(name)

    def scale():
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["first"] *= 0.5

    def step():
        model.set_adapter("first")
        model(input_ids=PROMPT).logits.square().mean().backward()
        trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
        torch.optim.AdamW(trained, lr=0.05, fused=True).step()

    states = {
        "a": lambda: on("first"),
        "b": lambda: on("second"),
        "none": off,
        "a again": lambda: on("first"),
        "a scaled": scale,
        "a trained": step,
        "a merged": model.merge_adapter,
        "a unmerged": model.unmerge_adapter,
    }
    outputs = {}
    for state, change in states.items():
        change()
        expected = generated(model)
        assert torch.equal(generated(model, cache_implementation="prefix-dynamic"), expected), state
        reused = hpc.last_report(inner).reused_tokens
        if state != "a unmerged":  # which may leave the last bit of a weight another one
            assert (reused > 0) == (state == "a again"), state
        assert torch.equal(generated(model, cache_implementation="prefix-dynamic"), expected), state
        assert hpc.last_report(inner).reused_tokens >= PROMPT.shape[1] - 1
        outputs[state] = expected
    assert torch.equal(outputs["a"], outputs["a again"])
    assert len({tuple(output[0].tolist()) for output in outputs.values()}) > 2


def test_peft_1627_trl_2669_7328_gradients_behind_one_prefix_equal_those_of_repeated_rows():
    """A fork stays part of the autograd graph, so a shared prompt can be computed once in training."""
    model = llama().train()
    suffixes = torch.tensor([[50, 51, 52], [60, 61, 62]])
    repeated = torch.cat([PROMPT.expand(2, -1), suffixes], dim=1)
    model(input_ids=repeated).logits[:, PROMPT.shape[1] :].square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(input_ids=PROMPT, **cache_argument(cache))
    batch = cache.fork(batch_size=2)
    model(input_ids=suffixes, **cache_argument(batch)).logits.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_31717_mellea_544_evicted_prefixes_free_their_tensors_at_once():
    model = llama()
    store = hpc.PrefixStore(max_bytes=60_000)
    hpc.set_store(model, store)
    gc.collect()
    gc.disable()
    try:
        generated(model, cache_implementation="prefix-dynamic")
        tree = next(iter(next(iter(store._memory.trees.values())).values()))
        held = [stack for node in tree.root.downwards() for block in node.blocks for stack in block.page.stacks]
        references = [weakref.ref(tensor) for tensor in held]
        del tree, held
        assert references
        for start in range(1, 20):
            other = (PROMPT + 2 * start) % 97 + 1
            model.generate(other, max_new_tokens=6, do_sample=False, cache_implementation="prefix-dynamic")
            assert store.nbytes <= 60_000
        assert not any(reference() is not None for reference in references)
        assert store.stats().evictions > 5
        store.evict(10**9)
        assert store.nbytes == 0
    finally:
        gc.enable()


def test_ktransformers_336_tensorrt_llm_6962_saved_state_comes_back_bit_for_bit_in_a_new_process(tmp_path):
    model = llama()
    snapshot = make_prefix(model, "prefix-dynamic")
    snapshot.save(tmp_path / "llama+prefix-dynamic.safetensors")
    script = Path(saved_prefixes.__file__)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    (found,) = torch.load(tmp_path / "found.pt").values()
    assert torch.equal(found, continuation(model, snapshot))


def test_37908_where_a_model_is_compiled_the_choice_is_a_cache_of_fixed_size():
    model = llama()
    assert hpc.choose_strategy(model, tokens=40, compiles=True).strategy == "prefix-static"
    assert hpc.choose_strategy(model, tokens=40, compiles=False).strategy == "prefix-dynamic"
    assert not hpc.PrefixDynamicCache(config=model.config).is_compileable
    assert hpc.PrefixStaticCache(config=model.config, max_cache_len=40).is_compileable


def test_peft_2821_llmlingua_246_one_module_reaches_into_the_cache_internals_of_transformers():
    """What is looked up by name in Transformers' internals is in `compat`; layer classes are documented names."""
    package = Path(hpc.__file__).parent
    private = []
    for path in package.rglob("*.py"):
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                private += [f"{path.name}: {name.name}" for name in node.names if name.name.startswith("_")]
    assert not private


def test_a_model_of_equal_shape_does_not_get_the_prefixes_of_another():
    first, second = llama(), build(llama().config, seed=4)
    store = hpc.PrefixStore(max_bytes=10**7)
    for model in (first, second):
        hpc.set_store(model, store)
    outputs = [generated(model, cache_implementation="prefix-dynamic") for model in (first, second, first, second)]
    assert hpc.last_report(second).reused_tokens > 0
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], generated(second))


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-offloaded"])
def test_peft_869_2191_a_prefix_under_gradient_checkpointing_is_refused_and_not_dropped(strategy):
    model = llama()
    expected = generated(model)
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    prefix = wrapped.prefill(PROMPT)
    checkpoint(model, True)
    # In evaluation it has no part.
    torch.testing.assert_close(generated(model, cache_implementation=strategy), expected)
    model.train()
    with pytest.raises(hpc.UnsupportedModelError, match="checkpointing"):
        generated(model, cache_implementation=strategy)
    with pytest.raises(hpc.UnsupportedModelError, match="checkpointing"):
        wrapped.prefill(PROMPT + 1)
    with pytest.raises(hpc.UnsupportedModelError, match="checkpointing"):
        wrapped.forward(PROMPT[:, :3], prefix=prefix)
    checkpoint(model, False)
    torch.testing.assert_close(generated(model, cache_implementation=strategy), expected)


def checkpoint(model, is_on):
    """Switch checkpointing by the name it has on this release."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_{'enable' if is_on else 'disable'}")()
