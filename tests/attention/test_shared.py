"""Attention over a shared prefix equals the plain reference, and generate with it the uncached call."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache import attention
from hf_prefix_cache.attention import gate, interface
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.layers import KeyValues
from tiny_models import TINY_MODELS

OPTIONS = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
# Full attention through Transformers' interface, in all or some of the layers.
SHARING = ["llama", "qwen3", "gpt2", "gemma3_text", "llama4"]


def run_of(rows, heads, tokens, head_dim, dtype):
    return KeyValues(
        torch.randn(rows, heads, tokens, head_dim).to(dtype), torch.randn(rows, heads, tokens, head_dim).to(dtype)
    )


@pytest.fixture
def counted(monkeypatch):
    """The calls of shared-prefix attention, with the cost gate wide open."""
    calls = []

    def count(*arguments):
        calls.append(arguments)
        return attention.shared_prefix_attention(*arguments)

    monkeypatch.setattr(gate, "_CROSSOVER", 1)
    monkeypatch.setattr(interface, "shared_prefix_attention", count)
    return calls


@pytest.mark.parametrize(
    ("heads", "key_heads"), [(4, 4), (6, 2), (8, 1)], ids=["multi-head", "grouped", "multi-query"]
)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_merged_attention_equals_the_reference_on_nested_levels(heads, key_heads, queries, dtype, allowed, masked):
    rows, head_dim = 5, 16
    query = torch.randn(rows, heads, queries, head_dim).to(dtype)
    levels = tuple(run_of(count, key_heads, tokens, head_dim, dtype) for count, tokens in ((1, 40), (1, 1), (rows, 3)))
    own = run_of(rows, key_heads, 7, head_dim, dtype)
    mask = None
    if masked:
        mask = torch.zeros(rows, 1, queries, 7, dtype=dtype)
        mask[1, :, :, :3] = mask[4, :, :, 6:] = float("-inf")
    for shared in ((), levels[:1], levels):
        result = attention.shared_prefix_attention(query, shared, own, mask, 0.25)
        expected = attention.reference_attention(query, shared, own, mask, 0.25)
        torch.testing.assert_close(result.double(), expected, atol=allowed, rtol=0)


def test_value_heads_of_another_size_are_merged_too():
    query = torch.randn(3, 4, 2, 16)
    shared = KeyValues(torch.randn(1, 4, 9, 16), torch.randn(1, 4, 9, 8))
    own = KeyValues(torch.randn(3, 4, 5, 16), torch.randn(3, 4, 5, 8))
    result = attention.shared_prefix_attention(query, (shared,), own, None, 0.25)
    expected = attention.reference_attention(query, (shared,), own, None, 0.25)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize(
    "extra",
    [{}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}],
    ids=["greedy", "returned", "beams"],
)
def test_generate_with_shared_attention_equals_the_uncached_call(name, extra, counted):
    model = TINY_MODELS[name]()
    prompts = torch.cat([torch.randint(3, 99, (1, 40)).expand(4, -1), torch.randint(3, 99, (4, 6))], dim=1)
    mask = torch.ones_like(prompts)
    if name in ("llama", "qwen3", "gpt2"):
        prompts[1] = torch.cat([torch.zeros(3, dtype=torch.long), prompts[1, :-3]])
        mask[1, :3] = 0
    options = {**OPTIONS, **extra, "attention_mask": mask}
    torch.manual_seed(1)
    expected = model.generate(prompts, **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(prompts, cache_implementation="prefix-dynamic", **options), expected)
    assert bool(counted) == (name in SHARING)


@torch.no_grad()
@pytest.mark.parametrize("name", SHARING)
def test_a_fork_attends_shared_only_inside_the_block_and_is_exact_on_both_sides(name, counted):
    model = TINY_MODELS[name]()
    prefix, suffixes = torch.randint(3, 99, (1, 24)), torch.randint(3, 99, (3, 4))
    expected = model(torch.cat([prefix.expand(3, -1), suffixes], dim=1), use_cache=False).logits[:, 24:]
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(prefix, **cache_argument(cache))
    fork = cache.fork(batch_size=3)
    held = hpc.total_nbytes([cache])
    first = model(suffixes[:, :1], **cache_argument(fork)).logits
    assert not counted
    with fork.attend_shared():
        second = model(suffixes[:, 1:3], **cache_argument(fork)).logits
        assert counted
    seen = len(counted)
    third = model(suffixes[:, 3:], **cache_argument(fork)).logits
    assert len(counted) == seen
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), expected, atol=1e-4, rtol=0)
    assert hpc.total_nbytes([cache, fork]) - held < held * 3 * 4 / 24 * 1.3 + 4096


def test_gradients_and_eager_attention_take_the_ordinary_path(counted):
    model = TINY_MODELS["llama"]()
    prefix, suffixes = torch.randint(3, 99, (1, 12)), torch.randint(3, 99, (2, 3))
    expected = model(torch.cat([prefix.expand(2, -1), suffixes], dim=1), use_cache=False).logits[:, 12:]
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(prefix, **cache_argument(cache))
    fork = cache.fork(batch_size=2)
    with fork.attend_shared():
        logits = model(suffixes, **cache_argument(fork)).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert logits.requires_grad
    assert not counted
    model.set_attn_implementation("eager")
    prompts = torch.cat([prefix.expand(2, -1), suffixes], dim=1)
    options = {**OPTIONS, "attention_mask": torch.ones_like(prompts)}
    expected = model.generate(prompts, **options)
    assert torch.equal(model.generate(prompts, cache_implementation="prefix-dynamic", **options), expected)
    assert not counted


@torch.no_grad()
def test_keys_that_do_not_reach_attention_are_noticed_at_the_next_layer():
    model = TINY_MODELS["llama"]()
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(torch.randint(3, 99, (1, 12)), **cache_argument(cache))
    fork = cache.fork(batch_size=2)
    states = torch.randn(2, *fork.layers[0].keys.shape[1:2], 1, fork.layers[0].keys.shape[-1])
    with fork.attend_shared():
        fork.update(states, states, 0)
        with pytest.raises(hpc.UnsupportedModelError, match="attend_shared"):
            fork.update(states, states, 1)
        fork.defer(True)  # forget the first layer's keys, which were lost on purpose


def test_after_an_error_or_an_interruption_nothing_is_left_switched(counted):
    model = TINY_MODELS["llama"]()
    prompts = torch.cat([torch.randint(3, 99, (1, 40)).expand(4, -1), torch.randint(3, 99, (4, 6))], dim=1)

    def interrupt(_, scores):
        raise KeyboardInterrupt

    for error, processor in ((KeyboardInterrupt, interrupt), (ZeroDivisionError, lambda ids, scores: 1 // 0)):
        with pytest.raises(error):
            model.generate(prompts, cache_implementation="prefix-dynamic", logits_processor=[processor], **OPTIONS)
    seen = len(counted)
    options = {**OPTIONS, "attention_mask": torch.ones_like(prompts)}
    expected = model.generate(prompts, **options)
    assert len(counted) == seen
    assert torch.equal(model.generate(prompts, cache_implementation="prefix-dynamic", **options), expected)
    assert model.config._attn_implementation == "sdpa"
