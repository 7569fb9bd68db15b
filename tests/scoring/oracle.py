"""The slow, plain way to score, and random request sets, for the tests of this folder."""

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tiny_models import VOCAB_SIZE

Request = tuple[list[int], list[int]]
PREFIX_TOKEN = 1  # what the tiny models' configurations name as their beginning-of-text token


def plain_scores(model: PreTrainedModel, requests: list[Request]) -> list[tuple[list[float], bool]]:
    """Score each request as an uncached row: log-probabilities of its tokens, and whether all are greedy."""
    scores = []
    for context, continuation in requests:
        if not context and continuation[:1] == [PREFIX_TOKEN]:
            context, continuation = continuation[:1], continuation[1:]
        row = [*(context or [PREFIX_TOKEN]), *continuation]
        if not continuation:
            scores.append(([], True))
            continue
        with torch.no_grad():
            logits = model(torch.tensor([row[:-1]]), use_cache=False).logits[0, -len(continuation) :]
        logprobs = logits.log_softmax(-1)
        targets = torch.tensor(continuation)
        scores.append(
            (logprobs.gather(1, targets[:, None])[:, 0].tolist(), bool((logits.argmax(-1) == targets).all()))
        )
    return scores


def assert_scores_match(found: list, expected: list[tuple[list[float], bool]], *, tolerance: float = 1e-4) -> None:
    """Compare scores with the oracle's, token by token and in sum."""
    assert len(found) == len(expected)
    for score, (logprobs, is_greedy) in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(score.token_logprobs), torch.tensor(logprobs), atol=tolerance, rtol=0, check_dtype=False
        )
        torch.testing.assert_close(score.logprob, sum(logprobs, 0.0), atol=tolerance * max(1, len(logprobs)), rtol=0)
        assert score.is_greedy == is_greedy


def tokens(low: int, high: int) -> st.SearchStrategy[list[int]]:
    """Draw token ids from few values, so that stretches agree by chance as well."""
    return st.lists(st.sampled_from([PREFIX_TOKEN, 5, 6, VOCAB_SIZE - 1]), min_size=low, max_size=high)


@st.composite
def request_sets(draw: st.DrawFn) -> list[Request]:
    """Draw requests that are nested, shared, unrelated, duplicate, one-token and empty in either part."""
    contexts = [draw(tokens(0, 14))]
    for _ in range(draw(st.integers(1, 4))):
        stem = draw(st.sampled_from(contexts))
        contexts.append(stem[: draw(st.integers(0, len(stem)))] + draw(tokens(0, 14)))
    requests = [(draw(st.sampled_from(contexts)), draw(tokens(0, 6))) for _ in range(draw(st.integers(1, 6)))]
    return requests + draw(st.lists(st.sampled_from(requests), max_size=2))
