"""What users of other projects have reported of linear attention, state spaces and beams, and how it behaves here.

The numbers are those of huggingface/transformers (tf) and of others where named.
"""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import counted, generated, tokens
from hf_prefix_cache.compat import takes_cache
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

MODELS = {**TINY_MODELS, **RECURRENT_MODELS}
BEAM_STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-offloaded")


@pytest.fixture(params=RECURRENT_MODELS)
def model(request):
    model = RECURRENT_MODELS[request.param]()
    if not takes_cache(model):
        pytest.skip("Mamba's own classes name their cache otherwise before 5.24, and are refused there")
    return model


def test_46190_one_call_and_calls_split_anywhere_give_the_same(model):
    wrapped, text = hpc.PrefixCachedModel(model), tokens(1, 12)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        for first, second in [(1, 2), (1, 11), (5, 6), (5, 9), (10, 11)]:
            hpc.store_for(model).clear()
            wrapped.prefill(text[:, :first])
            prefix = wrapped.prefill(text[:, :second])
            torch.testing.assert_close(prefix.next_logits, expected[:, second - 1], atol=2e-4, rtol=0)
            logits = wrapped.forward(text[:, second:], prefix=prefix).logits
            torch.testing.assert_close(logits, expected[:, second:], atol=2e-4, rtol=0)


def test_mlx_lm_980_a_running_state_is_kept_at_its_boundaries_and_what_is_computed_anew_is_in_the_numbers(model):
    prompt = tokens(1, 24)
    answer = generated(model, prompt, cache_implementation="prefix-dynamic")
    turn = torch.cat([answer, tokens(1, 4, seed=1)], dim=1)
    elsewhere = torch.cat([prompt[:, :15], tokens(1, 6, seed=2)], dim=1)  # no boundary is there
    for ids, reused in ((turn, answer.shape[1] - 1), (prompt, 23), (elsewhere, 0)):
        with counted(model) as count:
            output = generated(model, ids, cache_implementation="prefix-dynamic")
        assert torch.equal(output, generated(model, ids))
        report = hpc.last_report(model)
        assert report.reused_tokens == reused
        assert report.computed_tokens == ids.shape[1] - reused == count.tokens - (output.shape[1] - ids.shape[1] - 1)


@pytest.mark.parametrize("strategy", BEAM_STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("extra", [{}, {"do_sample": True}, {"num_return_sequences": 2}], ids=str)
def test_27449_beams_prefill_a_prompt_once_whatever_the_strategy(name, strategy, extra):
    model, prompt = MODELS[name](), tokens(1, 40)
    options = {"num_beams": 4, "max_new_tokens": 3, **extra}
    with counted(model) as count:
        output = generated(model, prompt, cache_implementation=strategy, **options)
    assert torch.equal(output, generated(model, prompt, **options))
    assert count.calls == [39, 4, 4, 4]  # all but the last token once, then every beam
