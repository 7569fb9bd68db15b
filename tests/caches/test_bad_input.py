"""What users may pass wrongly: a typed error that says what to do, and everything as it was before."""

import dataclasses

import pytest
import torch
from cache_oracles import (
    STRATEGIES,
    assert_exact,
    assert_unchanged,
    cached,
    contents,
    filled,
    new_cache,
    options_of,
    random_ids,
    uncached,
)
from transformers import LlamaConfig

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import (
    BatchSizeError,
    CacheCapacityError,
    FingerprintMismatchError,
    InputMismatchError,
    InvalidTokensError,
    LossyPrefixError,
    NotCroppableError,
    PrefixCacheError,
    SnapshotIncompleteError,
    UnknownOptionError,
    UnknownStrategyError,
)
from tiny_models import TINY_MODELS


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


class Held:
    """A cache of 13 tokens and its snapshot, which every error must leave as they are, and usable."""

    def __init__(self, strategy, name="gemma3_text", rows=1):
        self.model = TINY_MODELS[name]()
        self.text = random_ids(rows, 20)
        self.cache = filled(strategy, self.model, self.text[:, :13], room=20)
        self.snapshot = self.cache.snapshot(model=self.model, input_ids=self.text[:, :13])

    def refuses(self, error, *words, call):
        before = contents(self.cache), contents(self.snapshot)
        with pytest.raises(error) as caught:
            call()
        for word in words:
            assert str(word) in str(caught.value)
        assert_unchanged(self.cache, before[0])
        assert_unchanged(self.snapshot, before[1])
        expected = uncached(self.model, self.text)[:, 13:]
        assert_exact(cached(self.model, self.text[:, 13:], self.cache), expected)
        self.cache.restore(self.snapshot)
        assert_exact(cached(self.model, self.text[:, 13:], self.cache), expected)
        self.cache.restore(self.snapshot)


def test_a_suffix_that_does_not_fit_a_static_cache():
    held = Held("prefix-static")
    held.refuses(
        CacheCapacityError,
        "8 tokens do not fit behind the 13",
        "max_cache_len of at least 21",
        call=lambda: cached(held.model, random_ids(1, 8), held.cache),
    )
    held.refuses(CacheCapacityError, 21, call=lambda: held.cache.prepare_inputs(random_ids(1, 8)))


def test_a_prompt_that_does_not_fit_an_empty_static_cache():
    model = TINY_MODELS["llama"]()
    cache = new_cache("prefix-static", model, room=5)
    with pytest.raises(CacheCapacityError, match="at least 6"):
        cached(model, random_ids(1, 6), cache)
    assert cache.seq_length == 0
    assert not cache.tensors


def test_a_prefix_that_does_not_fit_a_static_cache(strategy):
    held = Held(strategy)
    short = new_cache("prefix-static", held.model, room=12)
    for call in (
        lambda: held.snapshot.to_cache("prefix-static", max_cache_len=12),
        lambda: short.restore(held.snapshot),
    ):
        held.refuses(CacheCapacityError, "max_cache_len is 12", "13 tokens", "at least 13", call=call)
    assert short.seq_length == 0


def test_other_rows_than_the_cache_holds(strategy):
    held = Held(strategy, rows=2)
    for rows in (1, 3):
        for call in (
            lambda rows=rows: cached(held.model, random_ids(rows, 2), held.cache),
            lambda rows=rows: held.cache.prepare_inputs(random_ids(rows, 2)),
        ):
            held.refuses(BatchSizeError, rows, 2, "fork", call=call)


def test_more_rows_than_static_buffers_have():
    held = Held("prefix-static", rows=2)
    three = filled("prefix-static", held.model, random_ids(3, 4)).snapshot()
    for call in (
        lambda: held.cache.restore(three),
        lambda: held.cache.batch_repeat_interleave(2),
        lambda: held.cache.reorder_cache(torch.tensor([0, 1, 1])),
        lambda: held.cache.batch_select_indices(torch.tensor([0, 1, 0])),
    ):
        held.refuses(BatchSizeError, "has room for 2", "max_batch_size=", call=call)


def test_batch_sizes_that_a_prefix_cannot_have(strategy):
    held = Held(strategy, rows=2)
    for size in (0, -1, 1, 3):
        for call in (
            lambda size=size: held.cache.fork(batch_size=size),
            lambda size=size: held.snapshot.to_cache(batch_size=size, **options_of(strategy)),
        ):
            held.refuses(BatchSizeError, f"batch_size is {size}", "2 rows", call=call)


def test_rows_that_are_not_held(strategy):
    held = Held(strategy, rows=2)
    for call in (
        lambda: held.cache.reorder_cache(torch.tensor([0, 2])),
        lambda: held.cache.reorder_cache(torch.tensor([-1, 0])),
        lambda: held.cache.reorder_cache(torch.tensor([], dtype=torch.int64)),
        lambda: held.cache.batch_select_indices(torch.tensor([2])),
        lambda: held.cache.batch_select_indices(torch.tensor([-3])),
        lambda: held.cache.batch_select_indices(torch.tensor([True, False, True])),
        lambda: held.cache.batch_select_indices(torch.tensor([False, False])),
        lambda: held.cache.batch_repeat_interleave(0),
    ):
        held.refuses(BatchSizeError, call=call)


@pytest.mark.parametrize("shape", [(1, 14), (1, 16), (2, 15), (1, 1, 15), (15,)])
def test_masks_of_another_shape(strategy, shape):
    held = Held(strategy)
    held.refuses(
        InputMismatchError,
        f"attention_mask has shape {list(shape)}",
        "13 cached and 2 new",
        "[1, 15]",
        call=lambda: held.cache.prepare_inputs(random_ids(1, 2), torch.ones(shape)),
    )


def test_masks_of_other_values_than_0_and_1(strategy):
    held = Held(strategy)
    mask = torch.tensor([[0.0, -1e9]])
    held.refuses(InputMismatchError, "0", "1", call=lambda: held.cache.prepare_inputs(random_ids(1, 2), mask))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one token"),
        ([[]], "at least one token"),
        (torch.zeros(1, 0, dtype=torch.int64), "at least one token"),
        ([[1.5]], "integers"),
        (["a"], "ints"),
        (None, "ints"),
        ([[1], [2, 3]], "even"),
        ([[2**70]], "ints"),
        (torch.ones(1, 2, dtype=torch.bool), "integers"),
        (torch.ones(1, 2, 2, dtype=torch.int64), "shape [1, 2, 2]"),
        ([[3, 99]], "99, the model's vocabulary size"),
        ([[3, -1]], "-1"),
    ],
    ids=str,
)
def test_ids_that_are_no_tokens(strategy, ids, words):
    held = Held(strategy)
    held.refuses(InvalidTokensError, "input_ids", words, call=lambda: held.cache.prepare_inputs(ids))
    if ids is not None:  # which tells a snapshot that its ids are not known
        held.refuses(InvalidTokensError, "input_ids", words, call=lambda: held.cache.snapshot(input_ids=ids))


def test_ids_and_logits_that_do_not_fit_what_is_held(strategy):
    held = Held(strategy)
    held.refuses(
        InputMismatchError, [1, 12], "1 rows of 13", call=lambda: held.cache.snapshot(input_ids=held.text[:, :12])
    )
    held.refuses(InputMismatchError, "3 rows", call=lambda: held.cache.snapshot(next_logits=torch.zeros(3, 99)))


def test_a_snapshot_of_an_empty_cache(strategy):
    cache = new_cache(strategy, TINY_MODELS["llama"]())
    with pytest.raises(InputMismatchError, match="empty"):
        cache.snapshot()


def test_a_snapshot_from_another_architecture(strategy):
    held = Held(strategy)
    other = TINY_MODELS["gemma3_text"]()
    other.config.rope_parameters["full_attention"]["rope_theta"] = 7.0
    for model in (TINY_MODELS["llama"](), other):
        foreign = filled(strategy, model, random_ids(1, 5)).snapshot()
        held.refuses(InputMismatchError, type(model.config).__name__, call=lambda s=foreign: held.cache.restore(s))


def test_a_snapshot_of_another_model_or_of_a_model_that_has_changed(strategy):
    held = Held(strategy)
    held.snapshot.verify(held.model)
    with pytest.raises(FingerprintMismatchError, match="another configuration"):
        held.cache.snapshot(model=TINY_MODELS["llama"]())
    held.model.lm_head.weight.mul_(2)
    with pytest.raises(FingerprintMismatchError, match="prefill it again"):
        held.snapshot.verify(held.model)
    with pytest.raises(SnapshotIncompleteError, match="model="):
        held.cache.snapshot().verify(held.model)


def test_a_prefix_of_another_dtype_in_static_buffers_that_exist():
    held = Held("prefix-static")
    half = filled("prefix-static", TINY_MODELS["gemma3_text"]().bfloat16(), random_ids(1, 5)).snapshot()
    held.refuses(InputMismatchError, "bfloat16", "float32", call=lambda: held.cache.restore(half))
    keys = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    held.refuses(InputMismatchError, "bfloat16", "autocast", call=lambda: held.cache.update(keys, keys, 0))


def test_keys_of_another_model_in_a_cache(strategy):
    held = Held(strategy)
    for shape in ((1, 1, 1, 8), (1, 2, 1, 4)):
        keys = torch.zeros(shape)
        held.refuses(InputMismatchError, "2 heads of size 8", call=lambda k=keys: held.cache.update(k, k, 1))


def test_cropping_past_what_can_be_undone(strategy):
    held = Held(strategy)
    assert not held.cache.can_crop_to(10)
    held.refuses(NotCroppableError, "from 13 to 10", "snapshot", call=lambda: held.cache.crop(-3))
    held.refuses(NotCroppableError, "from 13 to 10", "snapshot", call=lambda: held.cache.crop_to(10))
    held.refuses(NotCroppableError, "to 10", "window", call=lambda: held.snapshot.crop_to(10))


@pytest.mark.parametrize("length", [-1, 14])
def test_cropping_to_lengths_that_are_not_held(strategy, length):
    held = Held(strategy)
    assert not held.cache.can_crop_to(length)
    assert not held.snapshot.can_crop_to(length)
    held.refuses(NotCroppableError, length, "0 to 13", call=lambda: held.cache.crop_to(length))
    held.refuses(NotCroppableError, length, "0 to 13", call=lambda: held.snapshot.crop_to(length))


def test_a_positive_crop(strategy):
    held = Held(strategy)
    held.refuses(ValueError, "crop was called with 4", "crop_to(4)", call=lambda: held.cache.crop(4))


def test_strategies_that_do_not_exist(strategy):
    held = Held(strategy)
    held.refuses(
        UnknownStrategyError,
        "'dynamic'",
        "prefix-dynamic, ",
        "prefix-static",
        call=lambda: held.snapshot.to_cache("dynamic"),
    )


def test_options_that_do_not_belong_to_a_strategy(strategy):
    held = Held(strategy)
    held.refuses(
        UnknownOptionError,
        "'prefix-dynamic' has no option max_cache_len",
        call=lambda: held.snapshot.to_cache("prefix-dynamic", max_cache_len=30),
    )
    held.refuses(
        UnknownOptionError,
        "no option nbits",
        "max_batch_size",
        call=lambda: held.snapshot.to_cache("prefix-static", max_cache_len=30, nbits=4),
    )
    held.refuses(
        UnknownOptionError, "needs the option max_cache_len", call=lambda: held.snapshot.to_cache("prefix-static")
    )


def test_a_lossy_prefix_continues_elsewhere_only_when_asked_for():
    held = Held("prefix-dynamic")
    lossy = dataclasses.replace(held.snapshot, is_lossy=True)
    held.refuses(LossyPrefixError, "allow_lossy=True", call=lambda: lossy.to_cache("prefix-static", max_cache_len=30))
    assert lossy.to_cache("prefix-static", max_cache_len=30, allow_lossy=True).seq_length == 13
    assert lossy.to_cache().seq_length == 13


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_cache_len": 0}, CacheCapacityError),
        ({"max_cache_len": 8, "max_batch_size": 0}, BatchSizeError),
    ],
)
def test_static_caches_of_no_size(options, error):
    with pytest.raises(error, match="at least 1"):
        hpc.PrefixStaticCache(config=LlamaConfig(num_hidden_layers=1), **options)


def test_assigning_keys_which_snapshots_may_share():
    held = Held("prefix-dynamic")

    def assign(name):
        setattr(held.cache.layers[1], name, torch.zeros(1, 2, 13, 8))

    for name in ("keys", "values"):
        held.refuses(AttributeError, "crop", call=lambda name=name: assign(name))


def test_one_except_clause_catches_them_all():
    held = Held("prefix-dynamic")
    with pytest.raises(PrefixCacheError):
        held.cache.crop_to(99)
    with pytest.raises(PrefixCacheError):
        held.cache.fork(batch_size=0)
