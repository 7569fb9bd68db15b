"""What counts as rounding: what plain Transformers makes of the same row, in whichever way it is run."""

from functools import wraps

import pytest
import torch

from hf_prefix_cache.oracle import Oracle
from tiny_models import llama

PREFIX, SUFFIX = tuple(range(5, 17)), tuple(range(40, 45))

WAYS = {
    "in a batch": lambda ids: ids.shape[0] > 1,
    "one token a call": lambda ids: ids.shape == (1, 1),
    "all tokens of the suffix at once": lambda ids: ids.shape == (1, len(SUFFIX)),
}


class Noisy:
    """A model whose logits are off by ``noise`` in the calls that each ``where`` picks."""

    def __init__(self, model, *noises):
        self.model, self.noises = model, noises

    def __call__(self, input_ids, **options):
        output = self.model(input_ids=input_ids, **options)
        for where, noise in self.noises:
            if where(input_ids):
                output.logits = output.logits + noise
        return output

    def __getattr__(self, name):
        return getattr(self.model, name)


def judged(*noises):
    """Return the deviation and the tolerance of logits that are off by 3e-4."""
    oracle = Oracle(Noisy(llama(), *noises))
    with torch.no_grad():
        right = oracle.after(PREFIX, SUFFIX)
        return oracle.judge(right + 3e-4, right, PREFIX, SUFFIX)


@pytest.mark.parametrize("way", WAYS)
def test_rounding_of_plain_transformers_counts_in_whichever_way_it_is_run(way):
    deviation, tolerance = judged((WAYS[way], 2e-4))
    assert deviation == pytest.approx(3e-4, rel=0.05)
    assert tolerance == pytest.approx(4e-4, rel=0.05)


def test_without_such_rounding_the_usual_tolerance_holds():
    deviation, tolerance = judged()
    assert deviation > tolerance == 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_what_is_too_large_for_rounding_does_not_widen_the_tolerance(way):
    deviation, tolerance = judged((WAYS[way], 0.05))
    assert deviation > tolerance == 1e-4


def test_a_way_that_is_wrong_does_not_hide_the_rounding_of_another():
    _, tolerance = judged((WAYS["one token a call"], 0.05), (WAYS["all tokens of the suffix at once"], 2e-4))
    assert tolerance == pytest.approx(4e-4, rel=0.05)


def test_logits_of_the_prefix_are_not_computed():
    model = llama()
    forward, kept = model.forward, []

    @wraps(forward)
    def spy(*args, **options):
        output = forward(*args, **options)
        kept.append(output.logits.shape[1])
        return output

    model.forward = spy
    oracle = Oracle(model)
    with torch.no_grad():
        right = oracle.after(PREFIX, SUFFIX)
        oracle.judge(right + 3e-4, right, PREFIX, SUFFIX)
    assert max(kept) == len(SUFFIX)
