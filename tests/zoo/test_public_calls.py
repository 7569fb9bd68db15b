"""The public calls with their defaults, on every architecture: as the uncached model, or refused by a typed error."""

import warnings
from contextlib import nullcontext, suppress

import pytest
import torch

import hf_prefix_cache as hpc

from .build import ARCHITECTURES, CannotBuildError, build_architecture
from .coverage import release
from .markdown import standing
from .record import read_record, recorded_rows

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}


def generated(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})


def scores(model):
    context, rest = [5, 6, 7], [8, 9]
    found, _ = hpc.loglikelihood(model, [(context, rest), ([5, 6, 8], [9])], progress=False)
    logprobs = model(IDS[:, :4], use_cache=False).logits[0, 2:4].float().log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(rest)[:, None]).sum().item()
    assert found.logprob == pytest.approx(expected, abs=1e-4)


def chooses(model):
    assert hpc.choose_strategy(model, tokens=64).strategy in ("prefix-dynamic", "prefix-static")


def plans(model):
    assert hpc.plan([([5, 6, 7], [8])]).kv_bytes(model) >= 0


def generates(model):
    expected = generated(model, IDS, use_cache=False)
    for _ in range(2):  # computed, then reused
        assert torch.equal(generated(model, IDS, cache_implementation="prefix-auto"), expected)


def generates_rows(model):
    rows = IDS.repeat(5, 10)
    assert torch.equal(
        generated(model, rows, cache_implementation="prefix-dynamic"), generated(model, rows, use_cache=False)
    )


def forwards(model):
    wrapper = hpc.PrefixCachedModel(model)
    logits = wrapper.forward(IDS[:, 3:], prefix=wrapper.prefill(IDS[:, :3])).logits
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits[:, 3:], atol=1e-4, rtol=0)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_public_calls_are_exact_or_refused_by_name(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build_architecture(name)
        except CannotBuildError as error:
            pytest.skip(str(error)[:200])
        scores(model)
        plans(model)
        row = recorded_rows(read_record(), release()).get(name, {})
        serves = "cells" in row and standing(row, "prefix-dynamic") == "exact"
        for call in (chooses, generates, generates_rows, forwards):
            # What is recorded as exact may not be refused, either.
            with nullcontext() if serves else suppress(hpc.PrefixCacheError):
                call(model)
