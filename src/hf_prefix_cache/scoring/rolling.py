"""Rolling log-likelihood: long texts in windows, each token predicted once."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..exceptions import RequestError
from .loglikelihood import loglikelihood
from .model_access import length_limit, uncompiled_model
from .requests import ContinuationScore

__all__ = ["loglikelihood_rolling", "rolling_windows"]


def rolling_windows(
    tokens: Sequence[int], *, prefix_token_id: int, max_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield ``(context, continuation)`` windows that predict every token once, by lm-evaluation-harness' rules.

    The first window is predicted from the prefix token alone. Every later one is filled up to the limit: it has one
    token of context, the last one as much as fits.

    Args:
        tokens: The text's token ids.
        prefix_token_id: The token before the first (beginning-of-text or end-of-text).
        max_length: Tokens that the model reads at once.

    Example:
        >>> list(rolling_windows([1, 2, 3, 4, 5], prefix_token_id=0, max_length=3))
        [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    tokens = list(tokens)
    first = tokens[:max_length]
    if first:
        yield [prefix_token_id], first
    done = len(first)
    while done < len(tokens):
        end = min(done + max_length, len(tokens))
        yield tokens[max(end - max_length - 1, 0) : done], tokens[done:end]
        done = end


def loglikelihood_rolling(
    model: Any,
    token_lists: Sequence[Sequence[int]],
    *,
    prefix_token_id: int,
    max_length: int | None = None,
    **options: Any,
) -> list[ContinuationScore]:
    """Return the log-probability of each whole text, which may be longer than the model can read.

    Windows are lm-evaluation-harness' rolling ones; what texts have in common at their start is computed once.

    Args:
        model: As for `loglikelihood`.
        token_lists: Token ids of each text, without a prefix token.
        prefix_token_id: The token from which the first is predicted.
        max_length: Tokens of a window at most; by default what the model's configuration says.
        **options: Options of `loglikelihood`.

    Returns:
        One score for each text, over all of its tokens; 0.0 for an empty text.

    Raises:
        RequestError: If no limit is known, or it is below 1.
        InvalidTokensError: If an id is no integer or outside the model's vocabulary.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> (score,) = loglikelihood_rolling(model, [[3, 1, 4, 1, 5]], prefix_token_id=0, max_length=3, progress=False)
        >>> len(score.token_logprobs)
        5
    """
    if max_length is None:
        max_length = length_limit(uncompiled_model(model).config)
    if max_length is None or max_length < 1:
        raise RequestError(
            f"max_length is {max_length}, but windows need a limit of at least 1 token, and the model's configuration "
            "names none; pass max_length"
        )
    windows = [
        list(rolling_windows(tokens, prefix_token_id=prefix_token_id, max_length=max_length)) for tokens in token_lists
    ]
    flat = [window for of_text in windows for window in of_text]
    scores = iter(loglikelihood(model, flat, max_length=max_length, **options))
    return [_joined([next(scores) for _ in of_text]) for of_text in windows]


def _joined(parts: list[ContinuationScore]) -> ContinuationScore:
    return ContinuationScore(
        sum((part.logprob for part in parts), 0.0),
        all(part.is_greedy for part in parts),
        tuple(value for part in parts for value in part.token_logprobs),
    )
