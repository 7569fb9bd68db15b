"""A prompt asked again on a model with running states is computed for its last token only, in every mode."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import counted, generated, tokens
from hf_prefix_cache.compat import cache_argument, takes_cache
from recurrent_models import RECURRENT_MODELS

MODES = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beams": {"num_beams": 2},
    "returned": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 5},
}


@pytest.fixture(params=RECURRENT_MODELS)
def model(request):
    model = RECURRENT_MODELS[request.param]()
    if not takes_cache(model):
        pytest.skip("Mamba's own classes name their cache otherwise before 5.24, and are refused there")
    return model


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-offloaded"])
def test_the_same_prompt_twice_computes_its_last_token_only(model, strategy):
    prompt = tokens(1, 20)
    expected = generated(model, prompt)
    for computed in (20, 1, 1):
        with counted(model) as count:
            assert torch.equal(generated(model, prompt, cache_implementation=strategy), expected)
        report = hpc.last_report(model)
        assert (report.prompt_tokens, report.computed_tokens) == (20, computed)
        assert count.tokens == computed + expected.shape[1] - 20 - 1


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reuses_what_any_other_has_kept(model, mode):
    prompt = tokens(1, 20)
    generated(model, prompt, cache_implementation="prefix-dynamic", max_new_tokens=1)
    # Chunks are wrong behind a running state in plain Transformers.
    plain = {} if mode == "chunked" else MODES[mode]
    for _ in range(2):
        output = generated(model, prompt, cache_implementation="prefix-dynamic", **MODES[mode])
        assert torch.equal(output, generated(model, prompt, **plain))
        rows = hpc.last_report(model).rows
        assert hpc.last_report(model).computed_tokens == rows


def test_a_chunk_size_on_a_fresh_prompt_changes_nothing(model):
    prompt = tokens(1, 20)
    output = generated(model, prompt, cache_implementation="prefix-dynamic", prefill_chunk_size=6)
    assert torch.equal(output, generated(model, prompt))


def test_rows_that_are_the_same_prompt_and_prompts_that_share_all_but_the_end(model):
    prompts = tokens(1, 20).repeat(3, 1)
    prompts[2, -1] = 7
    for computed in (None, 3):
        output = generated(model, prompts, cache_implementation="prefix-dynamic")
        assert torch.equal(output, generated(model, prompts))
        assert computed is None or hpc.last_report(model).computed_tokens == computed


def test_a_prefix_is_asked_whole_as_a_prompt(model):
    wrapped, prompt = hpc.PrefixCachedModel(model), tokens(1, 20)
    prefix = wrapped.prefill(prompt)
    output = wrapped.generate(prompt, prefix=prefix, do_sample=False, max_new_tokens=5, suppress_tokens=[0])
    assert torch.equal(output, generated(model, prompt))
    assert wrapped.report().computed_tokens == 1
    assert torch.equal(prefix.next_logits, wrapped.prefill(prompt).next_logits)


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static"])
def test_a_passed_cache_that_holds_the_whole_prompt_is_filled_anew_and_the_report_says_so(model, strategy):
    wrapped, prompt = hpc.PrefixCachedModel(model), tokens(1, 12)
    options = {"max_cache_len": 32} if strategy == "prefix-static" else {}
    cache = wrapped.prefill(prompt).to_cache(strategy, **options)
    for _ in range(2):
        output = generated(model, prompt, **cache_argument(cache))
        assert torch.equal(output, generated(model, prompt))
        assert hpc.last_report(model).reused_tokens == 0
        assert "running state cannot go back" in hpc.last_report(model).reason
        cache.restore(wrapped.prefill(prompt))
    longer = torch.cat([prompt, tokens(1, 3, seed=1)], dim=1)
    assert torch.equal(generated(model, longer, **cache_argument(cache)), generated(model, longer))
    assert hpc.last_report(model).reused_tokens == 12


def test_without_reuse_nothing_is_kept(model):
    prompt, config = tokens(1, 20), {"reuse": False}
    output = generated(model, prompt, cache_implementation="prefix-dynamic", cache_config=config)
    assert torch.equal(output, generated(model, prompt))
    assert len(hpc.store_for(model)) == 0
