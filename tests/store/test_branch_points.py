"""Where two prompts part on a model that cannot be cut there, a prefix is kept: the third prompt starts from it."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

MODELS = {**TINY_MODELS, **{name: RECURRENT_MODELS[name] for name in ("mamba2", "lfm2", "qwen3_next")}}
SHARED, OWN = 60, 20


def prompts():
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(1, 99, (1, SHARED), generator=generator)
    # The first own token differs, so that they part exactly there.
    return [
        torch.cat(
            [shared, torch.tensor([[index + 1]]), torch.randint(1, 99, (1, OWN - 1), generator=generator)], dim=1
        )
        for index in range(3)
    ]


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static"])
@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gemma3_text", "lfm2", "qwen3_next"),
        pytest.param(
            "mamba2", marks=pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="refused by name before 5.24")
        ),
    ],
)
def test_the_second_prompt_makes_the_third_fast(name, strategy):
    model = MODELS[name]()
    reused = []
    for prompt in prompts():
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "do_sample": False}
        expected = model.generate(prompt, **options)
        found = model.generate(prompt, **options, cache_implementation=strategy)
        assert torch.equal(found, expected)
        report = hpc.last_report(model)
        reused.append(report.reused_tokens)
        assert report.computed_tokens == SHARED + OWN - report.reused_tokens
        hpc.store_for(model).sanity_check()
    assert reused == [0, 0, SHARED]


def test_where_every_layer_can_be_cut_there_is_no_branch_point():
    model = MODELS["llama"]()
    first, second, _ = prompts()
    model.generate(first, max_new_tokens=5, do_sample=False, cache_implementation="prefix-dynamic")
    store, fingerprint = hpc.store_for(model), hpc.fingerprint_of(model)
    assert store.branch_point(second[0], fingerprint) == 0
    assert store.match(second[0], fingerprint).seq_length == SHARED


def test_the_branch_point_is_where_the_prompts_part_for_this_model_and_tenant_only():
    model = MODELS["mistral"]()
    first, second, _ = prompts()
    model.generate(first, max_new_tokens=5, do_sample=False, cache_implementation="prefix-dynamic")
    store, fingerprint = hpc.store_for(model), hpc.fingerprint_of(model)
    assert store.branch_point(second[0], fingerprint) == SHARED
    assert store.branch_point(second[0], fingerprint, "tenant") == 0
    assert store.branch_point(second[0], "another model") == 0
    assert store.branch_point([98, 98], fingerprint) == 0


def test_a_few_shared_tokens_are_not_worth_a_forward_of_their_own():
    model = MODELS["mistral"]()
    for prompt in prompts():
        short = prompt[:, SHARED - 10 :]
        expected = model.generate(short, max_new_tokens=5, do_sample=False)
        found = model.generate(short, max_new_tokens=5, do_sample=False, cache_implementation="prefix-dynamic")
        assert torch.equal(found, expected)
        assert hpc.last_report(model).reused_tokens == 0
