"""Checks of what users pass in."""

import numpy as np
import pytest
import torch

from hf_prefix_cache.exceptions import InputMismatchError, InvalidTokensError, UnknownStrategyError
from hf_prefix_cache.validation import STRATEGIES, check_mask, check_strategy, check_token_ids, vocabulary_size
from tiny_models import TINY_MODELS


@pytest.mark.parametrize(
    "ids", [[3, 4], [[3, 4]], (3, 4), torch.tensor([3, 4], dtype=torch.int32), np.array([[3, 4]])], ids=str
)
def test_token_ids_of_any_form_become_int64_rows(ids):
    checked = check_token_ids(ids, vocabulary=5)
    assert checked.dtype == torch.int64
    assert checked.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    "ids", [[], [[]], [0.5], ["x"], None, [[1], [2, 3]], [True], [[[1]]], [2**70], 7, {1: 2}], ids=str
)
def test_what_is_no_token_ids_is_refused_by_the_argument_s_name(ids):
    with pytest.raises(InvalidTokensError, match="prompt"):
        check_token_ids(ids, name="prompt")


@pytest.mark.parametrize(("ids", "shown"), [([0, 5], "5"), ([-1, 4], "-1")])
def test_ids_out_of_the_vocabulary_are_named(ids, shown):
    with pytest.raises(InvalidTokensError, match=f"the id {shown}; ids are 0 or more and below 5"):
        check_token_ids(ids, vocabulary=5)


def test_the_vocabulary_comes_from_the_config_where_it_is_not_given():
    config = TINY_MODELS["llama"]().config
    assert check_token_ids([config.vocab_size - 1], config=config).tolist() == [[config.vocab_size - 1]]
    with pytest.raises(InvalidTokensError, match=str(config.vocab_size)):
        check_token_ids([config.vocab_size], config=config)


def test_the_vocabulary_of_a_model_is_that_of_its_input_embeddings():
    model = TINY_MODELS["llama"]()
    model.resize_token_embeddings(120)
    assert vocabulary_size(model) == 120


@pytest.mark.parametrize("mask", [[[1, 0]], [[True, False]], torch.tensor([[1.0, 0.0]])], ids=str)
def test_a_mask_over_the_new_tokens_is_completed_by_the_cached_ones(mask):
    assert check_mask(mask, rows=1, cached=2, new=2).tolist() == [[True, True, True, False]]


def test_a_full_mask_is_kept():
    assert check_mask([[0, 1, 1, 0]], rows=1, cached=2, new=2).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("mask", [[[1]], [[1, 1, 1]], [1, 1], [[1, 1], [1, 1]], [[[1, 1]]]], ids=str)
def test_a_mask_of_another_shape_is_refused_with_both_shapes_that_fit(mask):
    with pytest.raises(InputMismatchError, match=r"\[1, 4\], or \[1, 2\]"):
        check_mask(mask, rows=1, cached=2, new=2)


@pytest.mark.parametrize("mask", [[[0.0, -1e9]], [[2, 1]], [[float("nan"), 1.0]]], ids=str)
def test_a_mask_of_other_values_is_refused(mask):
    with pytest.raises(InputMismatchError, match="additive masks do not fit"):
        check_mask(mask, rows=1, cached=0, new=2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_names_are_returned_as_they_are(name):
    assert check_strategy(name) == name


@pytest.mark.parametrize("name", ["dynamic", "", "prefix_static", None])
def test_other_strategy_names_are_refused_with_the_list_of_all(name):
    with pytest.raises(UnknownStrategyError, match="prefix-dynamic, prefix-static"):
        check_strategy(name)
    with pytest.raises(UnknownStrategyError, match=r"are prefix-static$"):
        check_strategy("prefix-dynamic", available=("prefix-static",))
