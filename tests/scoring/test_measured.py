"""Ways of attention on an accelerator, measured on a CPU here: each gives the scores of the others."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from hf_prefix_cache.scoring import blocks, last_scoring_report, loglikelihood, measured, packed
from scoring.models import PACKED
from scoring.oracle import assert_scores_match, plain_scores

ROOT = [5, 9, 12, 7, 30, 41, 5, 9, 2, 77, 15, 3, 8]
REQUESTS = [([*ROOT, a, a + 1, *ROOT[:b]], [b + 20, a, 4]) for a in (20, 31, 40) for b in (1, 4, 9)]


@pytest.fixture(autouse=True)
def _measured_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "is_measured", lambda device: True)
    monkeypatch.setattr(measured, "_choices", {})
    monkeypatch.setattr(measured, "_LEAST_FOR_FLEX", 1)
    # Not compiled: what is tested is the mask it gets.
    monkeypatch.setattr(measured, "_compiled", [flex_attention])
    monkeypatch.setattr(blocks, "_LEAST", 2)
    monkeypatch.setattr(blocks, "_MOST", 5)


def _fastest(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def measure(ways: dict, query: torch.Tensor) -> measured.AttentionChoice:
        return measured.AttentionChoice(way if way in ways else "masked", {})

    monkeypatch.setattr(measured, "_measure", measure)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", ["masked", "blocks", "shared", "flex"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_every_way_gives_plain_scores(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fastest(monkeypatch, way)
    model = PACKED[name]()
    taken = set()
    for max_batch_tokens in (16, 512):
        scores = loglikelihood(model, REQUESTS, max_batch_tokens=max_batch_tokens, progress=False, self_check=False)
        assert_scores_match(scores, plain_scores(model, REQUESTS))
        taken |= {choice.way for choice in measured._choices.values()}
    # Behind a window nothing is seen by all.
    assert taken == ({"masked"} if (name, way) == ("mistral", "shared") else taken | {way})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_ways_are_measured_once_for_a_size_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = []
    original = measured._measure
    monkeypatch.setattr(measured, "_measure", lambda *a: measurements.append(1) or original(*a))
    model = PACKED["llama"]()
    loglikelihood(model, REQUESTS, max_batch_tokens=16, progress=False, self_check=False)
    first = len(measurements)
    assert 0 < first == len(measured._choices)
    assert all(choice.milliseconds.keys() >= {"masked"} for choice in measured._choices.values())
    assert all(
        choice.milliseconds[choice.way] == min(choice.milliseconds.values()) for choice in measured._choices.values()
    )
    loglikelihood(model, REQUESTS, max_batch_tokens=16, progress=False, self_check=False)
    assert len(measurements) == first
    report = last_scoring_report(model)
    assert report is not None
    assert report.attention.endswith(" ms)")


def test_a_way_that_fails_or_differs_is_not_taken() -> None:
    expected = torch.arange(6.0)

    def fails() -> torch.Tensor:
        raise NotImplementedError

    ways = {"masked": lambda: expected, "blocks": fails, "shared": lambda: expected + 1, "flex": lambda: expected}
    assert measured._measure(ways, expected).milliseconds.keys() == {"masked", "flex"}


def test_an_error_of_the_plain_way_is_raised() -> None:
    def fails() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        measured._measure({"masked": fails}, torch.zeros(1))
