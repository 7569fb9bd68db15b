from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefix_cache.exceptions import InvalidTokensError, RequestError
from hf_prefix_cache.scoring import last_scoring_report, loglikelihood_rolling
from hf_prefix_cache.scoring.rolling import rolling_windows
from scoring.models import NOT_PACKED, PACKED


def harness_windows(tokens: list[int], prefix: int, limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield lm-evaluation-harness' windows (`get_rolling_token_windows`, then `make_disjoint_window`)."""
    if not tokens:
        return
    first = min(limit, len(tokens))
    pairs = [([prefix, *tokens[: first - 1]], tokens[:first])]
    predicted = first
    while predicted < len(tokens):
        size = min(len(tokens) - predicted, limit)
        end = predicted + size
        pairs.append((tokens[end - limit - 1 : end - 1], tokens[end - size : end]))
        predicted += size
    for inputs, predictions in pairs:
        yield inputs[: len(inputs) - (len(predictions) - 1)], predictions


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 9))
def test_windows_are_the_harness_ones(tokens: list[int], limit: int) -> None:
    windows = list(rolling_windows(tokens, prefix_token_id=99, max_length=limit))
    assert windows == list(harness_windows(tokens, 99, limit))
    assert [token for _, predicted in windows for token in predicted] == tokens
    assert all(len(context) + len(predicted) <= limit + 1 for context, predicted in windows)


def test_rolling_scores_add_up_the_windows() -> None:
    model = PACKED["llama"]()
    texts = [[(i * 7) % 90 + 3 for i in range(23)], [], [5], [10, 17, 24]]
    scores = loglikelihood_rolling(model, texts, prefix_token_id=1, max_length=8, progress=False)
    for text, score in zip(texts, scores, strict=True):
        expected: list[float] = []
        for context, predicted in harness_windows(text, 1, 8):
            row = torch.tensor([[*context, *predicted][:-1]])
            with torch.no_grad():
                logprobs = model(row).logits[0, -len(predicted) :].log_softmax(-1)
            expected += logprobs.gather(1, torch.tensor(predicted)[:, None])[:, 0].tolist()
        torch.testing.assert_close(list(score.token_logprobs), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(score.logprob, sum(expected, 0.0), atol=1e-3, rtol=0)
    assert scores[1] == (0.0, True, ())


def test_texts_with_a_common_start_share_it() -> None:
    model = PACKED["llama"]()
    start = list(range(10, 40))
    loglikelihood_rolling(model, [[*start, 5], [*start, 6, 7]], prefix_token_id=1, progress=False)
    assert last_scoring_report(model).computed_tokens == 1 + 30 + 1


def test_windows_need_a_limit() -> None:
    model = PACKED["llama"]()
    with pytest.raises(RequestError, match="max_length is 0"):
        loglikelihood_rolling(model, [[1]], prefix_token_id=1, max_length=0)
    model = NOT_PACKED["mamba"]()
    with pytest.raises(RequestError, match="names none; pass max_length"):
        loglikelihood_rolling(model, [[1]], prefix_token_id=1)
    with pytest.raises(InvalidTokensError):
        loglikelihood_rolling(model, [["x"]], prefix_token_id=1, max_length=4, progress=False)
