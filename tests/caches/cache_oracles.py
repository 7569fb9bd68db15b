"""What the tests of caches compare with: plain, uncached Transformers, and copies of all that must not change."""

import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument

STRATEGIES = ("prefix-dynamic", "prefix-static")
WITHOUT_WINDOWS = ("llama", "qwen3", "gpt2", "bloom")
WITH_WINDOWS = ("gemma3_text", "mistral", "gpt_oss", "llama4")
LENGTH = 24  # tokens of a text; windows are 8 wide
ROOM = 32  # tokens that static caches hold


def new_cache(strategy, model, *, room=ROOM, **options):
    if strategy == "prefix-static":
        return hpc.PrefixStaticCache(config=model.config, max_cache_len=room, **options)
    return hpc.PrefixDynamicCache(config=model.config)


def options_of(strategy, *, room=ROOM):
    return {"max_cache_len": room} if strategy == "prefix-static" else {}


def random_ids(rows, tokens, *, vocabulary=99):
    return torch.randint(1, vocabulary, (rows, tokens))


def uncached(model, input_ids):
    """Logits of plain Transformers, each row alone, ``[rows, tokens, vocab]``."""
    return torch.cat([model(input_ids=row[None]).logits for row in input_ids])


def cached(model, input_ids, cache, **kwargs):
    """Logits of a raw forward call on a cache."""
    if CACHE_ARGUMENT != "cache" and model.config.model_type == "bloom" and isinstance(cache, hpc.PrefixStaticCache):
        # Before 5.24 Bloom's biases without a mask are too short for any static cache.
        kwargs["attention_mask"] = cache.prepare_inputs(input_ids).attention_mask
    return model(input_ids=input_ids, **kwargs, **cache_argument(cache)).logits


def filled(strategy, model, input_ids, **options):
    cache = new_cache(strategy, model, **options)
    cached(model, input_ids, cache)
    return cache


def assert_exact(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def contents(holder):
    """A bit-exact copy of all that a cache or snapshot holds, to be compared with `assert_unchanged`."""
    if isinstance(holder, hpc.PrefixSnapshot):
        states, told = holder.layers, (holder.input_ids, holder.next_logits, holder.padding_mask)
    else:
        states, told = [layer.state() for layer in holder.layers], (holder.known_ids, holder.padding_mask)
    tensors = [tensor.detach().clone() for state in states for tensor in state.tensors()]
    lengths = [(state.length, state.first, state.rows) for state in states]
    return lengths, tensors, [None if tensor is None else tensor.clone() for tensor in told]


def assert_unchanged(holder, before):
    lengths, tensors, told = contents(holder)
    assert lengths == before[0]
    for now, then in zip([*tensors, *told], [*before[1], *before[2]], strict=True):
        assert (now is None) == (then is None)
        assert now is None or torch.equal(now, then)


def addresses(cache):
    return [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
