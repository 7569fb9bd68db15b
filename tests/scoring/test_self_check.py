import gc
import weakref

import pytest
import torch

from hf_prefix_cache.exceptions import UnsupportedModelError
from hf_prefix_cache.scoring import last_scoring_report, loglikelihood, self_check
from hf_prefix_cache.scoring.masks import TreeLayout
from hf_prefix_cache.scoring.self_check import length_thresholds
from scoring.models import PACKED
from scoring.oracle import assert_scores_match, plain_scores
from tiny_models import WINDOW

REQUESTS = [([5, 9, 12, 7, 30, 41, 5, 9, 2, 77, 15, 3, 8, token], [22, 23, token]) for token in range(20, 26)]


def broken_layout(query_nodes, query_depths, key_nodes, key_depths, key_ends, *others) -> TreeLayout:
    """Make a layout in which tokens see all that stands before them."""
    return TreeLayout(query_nodes, query_depths, key_nodes, key_depths, key_ends + 1000, *others)


def test_wrong_packing_is_found_warned_of_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PACKED["llama"]()
    monkeypatch.setattr("hf_prefix_cache.scoring.packed.TreeLayout", broken_layout)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM is scored row by row.*packed scores did not match"):
        scores = loglikelihood(model, REQUESTS, progress=False)
    assert_scores_match(scores, plain_scores(model, REQUESTS))
    report = last_scoring_report(model)
    assert report.route == "rows"
    assert report.plain_requests == len(REQUESTS)
    assert report.self_check.outcome == "failed"
    assert report.self_check.largest_difference > report.self_check.tolerance == 1e-4
    assert report.self_check.judged_difference == report.self_check.largest_difference


def test_the_difference_that_half_precision_is_judged_by_is_within_the_tolerance_that_it_passed() -> None:
    model = PACKED["llama"]().to(torch.bfloat16)
    loglikelihood(model, REQUESTS, progress=False)
    found = last_scoring_report(model).self_check
    assert found.outcome == "passed"
    assert 0 < found.judged_difference <= found.tolerance
    assert found.judged_difference < found.largest_difference


def test_the_check_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PACKED["llama"]()
    monkeypatch.setattr("hf_prefix_cache.scoring.packed.TreeLayout", broken_layout)
    scores = loglikelihood(model, REQUESTS, progress=False, self_check=False)
    assert last_scoring_report(model).self_check.outcome == "off"
    with pytest.raises(AssertionError):
        assert_scores_match(scores, plain_scores(model, REQUESTS))


def test_an_error_of_the_fast_route_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PACKED["gpt2"]()

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedModelError("no such mask")

    monkeypatch.setattr("hf_prefix_cache.scoring.packed._feed", refuse)
    with pytest.warns(UserWarning, match="UnsupportedModelError: no such mask"):
        scores = loglikelihood(model, REQUESTS, progress=False)
    assert_scores_match(scores, plain_scores(model, REQUESTS))


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    compared: list[tuple[int, ...]] = []
    original = self_check._compare

    def compare(model, requests, reached, *rest):
        compared.append(reached)
        return original(model, requests, reached, *rest)

    monkeypatch.setattr(self_check, "_compare", compare)
    return compared


def test_a_state_of_the_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = count_comparisons(monkeypatch)
    model = PACKED["llama"]()
    for _ in range(3):
        loglikelihood(model, REQUESTS, progress=False)
        assert last_scoring_report(model).self_check.outcome == "passed"
    assert len(compared) == 1
    model.set_attn_implementation("eager")
    loglikelihood(model, REQUESTS, progress=False)
    assert len(compared) == 2
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    loglikelihood(model, REQUESTS, progress=False)
    assert len(compared) == 3


def test_thresholds_are_checked_on_both_sides_once_requests_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = count_comparisons(monkeypatch)
    model = PACKED["mistral"]()
    loglikelihood(model, [([5, 6], [7, 8])], progress=False)
    loglikelihood(model, REQUESTS, progress=False)
    assert compared == [(), (WINDOW,)]
    assert last_scoring_report(model).self_check.lengths[1] > WINDOW


def test_thresholds_come_from_the_whole_configuration() -> None:
    assert length_thresholds(PACKED["llama"]()) == ()
    assert length_thresholds(PACKED["gemma3_text"]()) == (WINDOW,)
    assert length_thresholds(PACKED["llama4"]()) == (WINDOW, 8192)
    assert length_thresholds(PACKED["phi3_longrope"]()) == (24,)
    sparse = PACKED["llama"]()
    sparse.config.index_block_size, sparse.config.index_topk_blocks, sparse.config.compress_rates = 4, 3, {"some": 8}
    assert length_thresholds(sparse) == (8, 12)


def test_models_that_round_much_are_judged_as_check_judges_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = self_check.differences
    monkeypatch.setattr(self_check, "differences", lambda expected, found: exact(expected, found) + 2e-4)
    with pytest.warns(UserWarning, match="did not match"):
        loglikelihood(PACKED["llama"](), REQUESTS, progress=False)
    # As far as plain Transformers is off behind a cached prefix, too, it is rounding.
    monkeypatch.setattr("hf_prefix_cache.oracle.Oracle._plain_deviations", lambda *_: (1.5e-4,))
    model = PACKED["llama"]()
    loglikelihood(model, REQUESTS, progress=False)
    check = last_scoring_report(model).self_check
    assert (check.outcome, check.tolerance) == ("passed", 3e-4)


def test_reports_and_checks_do_not_keep_a_model_alive() -> None:
    model = PACKED["llama"]()
    loglikelihood(model, REQUESTS, progress=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_checks_of_short_and_long_requests_are_both_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = count_comparisons(monkeypatch)
    model = PACKED["mistral"]()
    for _ in range(2):
        loglikelihood(model, [([5, 6], [7, 8])], progress=False)
        loglikelihood(model, REQUESTS, progress=False)
    assert len(compared) == 2


def test_half_precision_is_judged_by_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PACKED["llama"]().to(torch.bfloat16)
    loglikelihood(model, REQUESTS, progress=False)
    assert last_scoring_report(model).self_check.outcome == "passed"
    monkeypatch.setattr("hf_prefix_cache.scoring.packed.TreeLayout", broken_layout)
    with torch.no_grad():
        model.lm_head.weight.add_(1e-2)
    with pytest.warns(UserWarning, match="did not match"):
        loglikelihood(model, REQUESTS, progress=False)
