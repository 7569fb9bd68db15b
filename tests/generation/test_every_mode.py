"""Every mode of ``generate`` with every strategy: what the uncached call gives, or an error that names the remedy."""

from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_prefix_cache as hpc
from generation.oracles import generated, tokens
from hf_prefix_cache.compat import cache_argument
from recurrent_models import RECURRENT_MODELS
from tiny_models import DECODER, TINY_MODELS, build

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
STRATEGIES = (
    *("prefix-dynamic", "prefix-static", "prefix-offloaded"),
    pytest.param("prefix-quantized", marks=needs_bitsandbytes),
)
MODELS = {**TINY_MODELS, **RECURRENT_MODELS}
# Longer than any prompt here: all tokens stay exact, so that what is compared is the mode and not the loss.
EXACT = {"cache_config": {"residual_length": 256}}


class StopsAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 33)


class Recorder(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.reshape(-1).tolist())

    def end(self):
        self.values.append("end")


def assistant(name=None):
    model = build(LlamaConfig(**{**DECODER, "num_hidden_layers": 1}), seed=3)
    model.generation_config.cache_implementation = name
    return model


MODES = {
    "greedy": dict,
    "sample": lambda: {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": lambda: {"num_beams": 3},
    "beam_sample": lambda: {"num_beams": 3, "do_sample": True},
    "returned": lambda: {"do_sample": True, "num_return_sequences": 3},
    "returned_beams": lambda: {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "lookup": lambda: {"prompt_lookup_num_tokens": 3, "max_new_tokens": 9},
    "assisted": lambda: {"assistant_model": assistant(), "max_new_tokens": 9},
    "assisted_by_name": lambda: {"assistant_model": assistant("prefix-dynamic"), "max_new_tokens": 9},
    "assisted_sample": lambda: {"assistant_model": assistant(), "do_sample": True, "max_new_tokens": 9},
    "chunked": lambda: {"prefill_chunk_size": 7},
    "streamer": lambda: {"streamer": Recorder()},
    "allowed": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [5 + len(ids) % 7, 40, 41]},
    "scores": lambda: {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "beam_scores": lambda: {"num_beams": 2, "output_scores": True, "return_dict_in_generate": True},
    "attentions": lambda: {"output_attentions": True, "return_dict_in_generate": True},
    "stopping": lambda: {"stopping_criteria": StoppingCriteriaList([StopsAt()]), "max_new_tokens": 9},
    "processors": lambda: {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}
# What a strategy refuses by name: a static cache cannot take drafts back from a window or a running state.
REFUSED = {
    (name, "prefix-static", mode): hpc.UnsupportedModelError
    for name in ("gemma3_text", "lfm2")
    for mode in ("lookup", "assisted", "assisted_by_name", "assisted_sample")
}


def call(model, prompt, mode, **options):
    """Return what a call gave, and what a streamer was given; or the kind of error it raised."""
    options = {**MODES[mode](), **options}
    torch.manual_seed(0)
    try:
        result = generated(model, prompt, **options)
    except Exception as error:  # of any kind: both calls must raise the same
        return type(error)
    streamed = getattr(options.get("streamer"), "values", [])
    return result, streamed


def assert_same(ours, theirs, *, is_static):
    """Compare sequences token for token, and all that comes with them within 1e-4."""
    if isinstance(theirs, type):
        assert ours is theirs
        return
    assert not isinstance(ours, type), ours
    assert ours[1] == theirs[1]
    ours, theirs = ours[0], theirs[0]
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        return
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits", "sequences_scores"):
        if theirs.get(name) is not None:
            for one, other in zip(ours[name], theirs[name], strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    if theirs.get("attentions") is not None:
        for ours_step, theirs_step in zip(ours.attentions, theirs.attentions, strict=True):
            for one, other in zip(ours_step, theirs_step, strict=True):
                if is_static and one is not None:
                    one = one[..., : other.shape[-1]]  # buffers are longer than what they hold
                torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def known():
    """Models and their uncached results: each is computed once."""
    return {}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_fresh_and_with_reuse_a_mode_gives_what_the_uncached_call_gives(name, mode, strategy, known):
    if name not in known:
        known[name] = MODELS[name]()
        known[name].set_attn_implementation("eager")
    model, prompt = known[name], tokens(1, 10).repeat(1, 3)
    if (name, mode) not in known:
        # Chunks are an option of memory: what they must give is what one call gives.
        known[name, mode] = call(model, prompt, "greedy" if mode == "chunked" else mode)
    expected = known[name, mode]
    hpc.store_for(model).clear()
    options = {"cache_implementation": strategy, **(EXACT if strategy == "prefix-quantized" else {})}
    for _ in range(2):
        ours = call(model, prompt, mode, **options)
        if (name, strategy, mode) in REFUSED:
            assert ours is REFUSED[name, strategy, mode]
        else:
            assert_same(ours, expected, is_static=strategy == "prefix-static")
    if not isinstance(ours, type) and mode != "attentions":
        assert hpc.last_report(model).reused_tokens > 0, hpc.last_report(model)


def filled(model, ids, strategy):
    """Return a cache of ``strategy`` that holds ``ids`` and knows them."""
    options = {"prefix-static": {"max_cache_len": 64}, "prefix-quantized": EXACT["cache_config"]}.get(strategy, {})
    with torch.no_grad():
        return hpc.PrefixCachedModel(model).prefill(ids).to_cache(strategy, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("mode", ["greedy", "sample", "beams", "returned", "chunked"])
def test_a_passed_cache_gives_what_the_uncached_call_gives(name, mode, strategy, known):
    if name not in known:
        known[name] = MODELS[name]()
        known[name].set_attn_implementation("eager")
    model, prompt = known[name], tokens(1, 10).repeat(1, 3)
    expected = call(model, prompt, "greedy" if mode == "chunked" else mode)[0]
    rows = {"beams": 3, "returned": 3}.get(mode, 1)
    cache = filled(model, prompt[:, :17], strategy)
    if rows > 1 and strategy == "prefix-static":
        cache = cache.snapshot(input_ids=prompt[:, :17]).to_cache(strategy, batch_size=rows, max_cache_len=64)
    elif rows > 1:
        cache = cache.fork(batch_size=rows)
    before = cache.snapshot(input_ids=prompt[:, :17])
    output, _ = call(model, prompt, mode, **cache_argument(cache))
    assert torch.equal(output, expected)
    assert hpc.last_report(model).reused_tokens == rows * 17
    cache.restore(before)
    if rows == 1:  # and the new tokens alone
        output, _ = call(model, prompt[:, 17:], mode, **cache_argument(cache))
        assert torch.equal(output[:, 13:], expected[:, 30:])
