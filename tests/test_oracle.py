"""What counts as rounding: what plain Transformers makes of the same row, in whichever way it is run."""

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
    """A model whose logits are off by ``noise`` in the calls that ``where`` picks."""

    def __init__(self, model, where, noise):
        self.model, self.where, self.noise = model, where, noise

    def __call__(self, input_ids, **options):
        output = self.model(input_ids=input_ids, **options)
        if self.where(input_ids):
            output.logits = output.logits + self.noise
        return output

    def __getattr__(self, name):
        return getattr(self.model, name)


def judged(where, noise):
    """Return the deviation and the tolerance of logits that are off by 3e-4."""
    oracle = Oracle(Noisy(llama(), where, noise))
    with torch.no_grad():
        right = oracle.after(PREFIX, SUFFIX)
        return oracle.judge(right + 3e-4, right, PREFIX, SUFFIX)


@pytest.mark.parametrize("way", WAYS)
def test_rounding_of_plain_transformers_counts_in_whichever_way_it_is_run(way):
    deviation, tolerance = judged(WAYS[way], 2e-4)
    assert deviation == pytest.approx(3e-4, rel=0.05)
    assert tolerance == pytest.approx(4e-4, rel=0.05)


def test_without_such_rounding_the_usual_tolerance_holds():
    deviation, tolerance = judged(lambda ids: False, 0.0)
    assert deviation > tolerance == 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_what_is_too_large_for_rounding_does_not_widen_the_tolerance(way):
    deviation, tolerance = judged(WAYS[way], 0.05)
    assert deviation > tolerance == 1e-4
