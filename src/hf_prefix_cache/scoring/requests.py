"""Scoring requests as flat arrays: checked once, cut to the model's length once, then never as Python lists again."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..exceptions import CacheCapacityError, InvalidTokensError, RequestError

__all__ = ["ContinuationScore", "TokenRequests", "Truncation", "check_vocabulary", "fit_to_length", "pack_requests"]

Truncation = Literal["error", "left"]

_MAX_TOKEN = 2**31 - 1


class ContinuationScore(NamedTuple):
    """The score of one continuation; its first two fields are lm-evaluation-harness' ``(logprob, is_greedy)``.

    Attributes:
        logprob: Sum of the log-probabilities of the continuation's tokens given all tokens before each; 0.0 for an
            empty continuation.
        is_greedy: Whether every token of the continuation is the model's most probable one; True for an empty one.
        token_logprobs: One log-probability for each scored token, in order.

    Example:
        >>> logprob, is_greedy = ContinuationScore(-1.5, False, (-0.5, -1.0))[:2]
        >>> logprob, is_greedy
        (-1.5, False)
    """

    logprob: float
    is_greedy: bool
    token_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class TokenRequests:
    """All requests, back to back.

    Attributes:
        tokens: Context and continuation of each request, ``[total]``, int32.
        starts: Where each request begins in ``tokens``, and the end of the last one, ``[requests + 1]``, int64.
        context_lengths: Tokens of each context, ``[requests]``, int64; at least 1 wherever something is scored.
    """

    tokens: np.ndarray
    starts: np.ndarray
    context_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.context_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each request, context and continuation together, ``[requests]``."""
        return np.diff(self.starts)

    @property
    def continuation_lengths(self) -> np.ndarray:
        """Tokens of each continuation, ``[requests]``."""
        return self.lengths - self.context_lengths

    @property
    def fed_lengths(self) -> np.ndarray:
        """Tokens of each request that a model reads, ``[requests]``: all but the last, none if nothing is scored."""
        return np.where(self.continuation_lengths > 0, self.lengths - 1, 0)

    def select(self, chosen: np.ndarray) -> "TokenRequests":
        """Return the requests for which ``chosen``, ``[requests]`` bool, is true."""
        tokens = self.tokens[np.repeat(chosen, self.lengths)]
        starts = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        return TokenRequests(tokens, starts, self.context_lengths[chosen])


def pack_requests(requests: Iterable[Any], *, prefix_token_id: int | None = None) -> TokenRequests:
    """Check the requests' form and lay their tokens out back to back.

    An empty context follows lm-evaluation-harness: it becomes the prefix token, and if the continuation begins with
    that token already, that first token is the context and is not scored.

    Args:
        requests: Pairs ``(context_ids, continuation_ids)`` of lists, tuples, NumPy arrays or tensors of token ids.
        prefix_token_id: What an empty context becomes (beginning-of-text or end-of-text token).

    Returns:
        The requests, in the order given.

    Raises:
        RequestError: If a request is not a pair of token sequences, or has an empty context and there is no prefix
            token. The message names its index.
        InvalidTokensError: If an id is not an integer, negative or too large. The message names the request's index.

    Example:
        >>> packed = pack_requests([([1, 2], [3]), ([1], [4, 5])])
        >>> packed.tokens.tolist(), packed.starts.tolist(), packed.context_lengths.tolist()
        ([1, 2, 3, 1, 4, 5], [0, 3, 6], [2, 1])
    """
    buffer: array[int] = array("i")
    starts, context_lengths = [0], []
    for index, request in enumerate(requests):
        context, continuation = _as_pair(request, index)
        begin = starts[-1]
        _append(buffer, context, index, "context")
        length = len(buffer) - begin
        if length == 0 and len(continuation):
            if prefix_token_id is None:
                raise RequestError(
                    f"request {index} has an empty context, so nothing predicts its first token, and no prefix token "
                    "is known; begin the context with the model's beginning-of-text token"
                )
            # The harness' rule: a continuation that brings the prefix token along is not given a second one.
            length = 1
            if int(continuation[0]) != prefix_token_id:
                buffer.append(prefix_token_id)
        _append(buffer, continuation, index, "continuation")
        context_lengths.append(length)
        starts.append(len(buffer))
    tokens = np.frombuffer(buffer, dtype=np.int32) if buffer else np.zeros(0, dtype=np.int32)
    return TokenRequests(tokens, np.asarray(starts, dtype=np.int64), np.asarray(context_lengths, dtype=np.int64))


def check_vocabulary(requests: TokenRequests, vocab_size: int) -> None:
    """Raise `InvalidTokensError`, naming the request, if an id is negative or not below ``vocab_size``."""
    if len(requests.tokens) == 0 or (requests.tokens.min() >= 0 and requests.tokens.max() < vocab_size):
        return
    place = int(np.argmax((requests.tokens < 0) | (requests.tokens >= vocab_size)))
    index = int(np.searchsorted(requests.starts, place, side="right")) - 1
    raise InvalidTokensError(
        f"request {index} holds the token id {requests.tokens[place]}, but the model knows ids 0 to {vocab_size - 1} "
        "only; encode the text with this model's own tokenizer"
    )


def fit_to_length(requests: TokenRequests, max_length: int | None, truncation: Truncation) -> TokenRequests:
    """Hold every request to the model's limit.

    Args:
        requests: The requests.
        max_length: Tokens that the model can read at once; None for no limit. The last token of a request is not read.
        truncation: ``"left"`` drops the first tokens of contexts that are too long, as lm-evaluation-harness does;
            ``"error"`` raises.

    Returns:
        The requests themselves, or shortened copies.

    Raises:
        CacheCapacityError: If a request is too long and ``truncation`` is ``"error"``, or if a continuation alone is
            longer than the limit. The message names the first such request.
        RequestError: If ``truncation`` is neither of the two.
    """
    if truncation not in ("error", "left"):
        raise RequestError(f'truncation is {truncation!r} but has to be "error" or "left"')
    if max_length is None:
        return requests
    surplus = np.maximum(requests.fed_lengths - max_length, 0)
    if not surplus.any():
        return requests
    if truncation == "error":
        index = int(np.argmax(surplus > 0))
        raise CacheCapacityError(
            f"request {index} needs {requests.fed_lengths[index]} tokens but the model reads at most {max_length}; "
            'shorten its context, pass truncation="left", or use loglikelihood_rolling for long texts '
            f"({int((surplus > 0).sum())} of {len(requests)} requests are too long)"
        )
    context_lengths = requests.context_lengths - surplus
    if (context_lengths < 1).any():
        index = int(np.argmax(context_lengths < 1))
        raise CacheCapacityError(
            f"request {index} has a continuation of {requests.continuation_lengths[index]} tokens, but the model "
            f"reads at most {max_length} tokens; score it with loglikelihood_rolling, which cuts it into windows"
        )
    place_in_request = np.arange(len(requests.tokens)) - np.repeat(requests.starts[:-1], requests.lengths)
    kept = place_in_request >= np.repeat(surplus, requests.lengths)
    starts = np.concatenate([[0], np.cumsum(requests.lengths - surplus)])
    return TokenRequests(requests.tokens[kept], starts, context_lengths)


def _as_pair(request: Any, index: int) -> tuple[Sequence[int], Sequence[int]]:
    if isinstance(request, str) or not hasattr(request, "__len__") or len(request) != 2:
        raise RequestError(
            f"request {index} is {_shortened(request)}; a request is a pair (context_ids, continuation_ids)"
        )
    context, continuation = request
    for name, part in (("context", context), ("continuation", continuation)):
        if isinstance(part, str):
            raise RequestError(f"the {name} of request {index} is text; encode text pairs with hpc.encode_pairs first")
        if not hasattr(part, "__len__") or getattr(part, "ndim", 1) != 1:
            raise RequestError(
                f"the {name} of request {index} is {_shortened(part)}; it has to be a flat list of token ids"
            )
    return context, continuation


def _append(buffer: "array[int]", ids: Any, index: int, name: str) -> None:
    if isinstance(ids, (np.ndarray, torch.Tensor)):
        ids = ids.tolist()
    try:
        buffer.fromlist(ids if type(ids) is list else list(ids))
    except (TypeError, OverflowError) as error:
        wrong = next(x for x in ids if not (isinstance(x, int) and -_MAX_TOKEN - 1 <= x <= _MAX_TOKEN))
        raise InvalidTokensError(
            f"the {name} of request {index} holds {_shortened(wrong)}; token ids are integers below the vocabulary's "
            "size"
        ) from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
