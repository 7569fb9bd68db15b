import numpy as np
import pytest
import torch

from hf_prefix_cache.exceptions import CacheCapacityError, InvalidTokensError, RequestError
from hf_prefix_cache.scoring.requests import check_vocabulary, fit_to_length, pack_requests


def test_requests_are_laid_out_back_to_back() -> None:
    packed = pack_requests([([1, 2], (3,)), (np.array([4]), torch.tensor([5, 6])), ([7], [])])
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.context_lengths.tolist() == [2, 1, 1]
    assert packed.continuation_lengths.tolist() == [1, 2, 0]
    assert packed.fed_lengths.tolist() == [2, 2, 0]
    chosen = packed.select(np.array([False, True, True]))
    assert chosen.tokens.tolist() == [4, 5, 6, 7]
    assert chosen.starts.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([1], [2], [3]), "request 1 is"),
        ("text", "request 1 is 'text'"),
        (7, "request 1 is 7"),
        (("text", [1]), "the context of request 1 is text; encode text pairs with hpc.encode_pairs"),
        (([1], "text"), "the continuation of request 1 is text"),
        ((torch.ones(2, 2, dtype=torch.long), [1]), "the context of request 1 is"),
        ((3, [1]), "the context of request 1 is 3"),
    ],
)
def test_malformed_requests_are_named(request_: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pack_requests([([1], [2]), request_])


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([1, 2.5], "2.5"),
        (["3"], "'3'"),
        ([None], "None"),
        ([2**31], str(2**31)),
        (torch.tensor([1.5]), "1.5"),
        ([[1]], r"\[1\]"),
    ],
)
def test_ids_that_are_no_integers_are_named(ids: object, shown: str) -> None:
    with pytest.raises(InvalidTokensError, match=f"the continuation of request 1 holds {shown}"):
        pack_requests([([1], [2]), ([1], ids)])


def test_an_empty_context_becomes_the_prefix_token_unless_the_continuation_brings_it() -> None:
    packed = pack_requests([([], [5, 6]), ([], [9, 6]), ([], [])], prefix_token_id=9)
    assert packed.tokens.tolist() == [9, 5, 6, 9, 6]
    assert packed.context_lengths.tolist() == [1, 1, 0]
    assert packed.fed_lengths.tolist() == [2, 1, 0]
    with pytest.raises(RequestError, match="request 0 has an empty context"):
        pack_requests([([], [5])])


def test_the_vocabulary_is_checked_by_request() -> None:
    packed = pack_requests([([1], [2]), ([3, 10], [4])])
    check_vocabulary(packed, 11)
    with pytest.raises(InvalidTokensError, match=r"request 1 holds the token id 10.*0 to 9"):
        check_vocabulary(packed, 10)


def test_contexts_are_cut_from_the_left_to_the_limit() -> None:
    packed = pack_requests([([1, 2, 3, 4], [5, 6]), ([1], [2])])
    assert fit_to_length(packed, 5, "error") is packed
    assert fit_to_length(packed, None, "error") is packed
    cut = fit_to_length(packed, 3, "left")
    assert cut.tokens.tolist() == [3, 4, 5, 6, 1, 2]
    assert cut.context_lengths.tolist() == [2, 1]
    with pytest.raises(CacheCapacityError, match=r"request 0 needs 5 tokens.*\(1 of 2 requests"):
        fit_to_length(packed, 3, "error")
    with pytest.raises(CacheCapacityError, match="request 0 has a continuation of 2 tokens"):
        fit_to_length(packed, 1, "left")
    with pytest.raises(RequestError, match="truncation is 'right'"):
        fit_to_length(packed, 3, "right")
