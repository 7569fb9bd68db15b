"""Batches of unequal suffixes through raw forward: `prepare_inputs` makes every row equal its own uncached forward."""

import pytest
import torch
from cache_oracles import (
    STRATEGIES,
    WITH_WINDOWS,
    WITHOUT_WINDOWS,
    assert_exact,
    assert_unchanged,
    cached,
    contents,
    filled,
    new_cache,
    options_of,
    random_ids,
)
from transformers import MptConfig, RobertaConfig

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.exceptions import InputMismatchError, UnsupportedModelError
from tiny_models import TINY_MODELS
from zoo.build import build_architecture

PAD = 0
SIDES = ("left", "right")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=WITHOUT_WINDOWS)
def model(request):
    return TINY_MODELS[request.param]()


def padded(suffixes, side):
    width = max(len(suffix) for suffix in suffixes)
    ids = torch.full((len(suffixes), width), PAD)
    mask = torch.zeros(len(suffixes), width, dtype=torch.int64)
    for row, suffix in enumerate(suffixes):
        where = slice(0, len(suffix)) if side == "right" else slice(width - len(suffix), width)
        ids[row, where], mask[row, where] = torch.tensor(suffix, dtype=torch.int64), 1
    return ids, mask


class Conversation:
    """A cache beside the plain tokens of each of its rows; every step is compared with uncached forwards."""

    def __init__(self, model, cache, rows):
        self.model, self.cache, self.rows = model, cache, [list(row) for row in rows]

    def step(self, lengths, side="right", *, full_mask=False):
        suffixes = [torch.randint(1, 99, (length,)).tolist() for length in lengths]
        ids, mask = padded(suffixes, side)
        passed = mask
        if full_mask:
            passed = torch.cat([torch.ones(len(ids), self.cache.seq_length, dtype=torch.int64), mask], dim=1)
        inputs = self.cache.prepare_inputs(ids, passed)
        logits = self.model(**inputs._asdict(), **cache_argument(self.cache)).logits
        for row, suffix in enumerate(suffixes):
            self.rows[row] += suffix
            if suffix:
                expected = self.model(input_ids=torch.tensor([self.rows[row]])).logits[0, -len(suffix) :]
                assert_exact(logits[row, mask[row].bool()], expected)


def conversation(strategy, model, rows=3, prefix=7):
    ids = random_ids(1, prefix)
    return Conversation(model, filled(strategy, model, ids).fork(batch_size=rows), [ids[0].tolist()] * rows)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_suffixes_then_padded_again_then_single_tokens_equal_each_row_alone(strategy, model, side):
    talk = conversation(strategy, model)
    talk.step([1, 4, 2], side)
    talk.step([3, 1, 2], "left" if side == "right" else "right", full_mask=True)
    talk.step([1, 1, 1])
    talk.step([1, 0, 1])
    talk.step([1, 1, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_left_padded_prompts_on_an_empty_cache_equal_each_row_alone(strategy, model):
    talk = Conversation(model, new_cache(strategy, model), [[], [], []])
    talk.step([5, 2, 9], "left")
    talk.step([2, 2, 1], "right")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forks_of_a_padded_cache_remember_its_padding(strategy, model):
    talk = conversation(strategy, model)
    talk.step([1, 4, 2], "left")
    forked = Conversation(model, talk.cache.fork(), talk.rows)
    forked.step([2, 1, 3])
    talk.step([1, 3, 1])
    forked.step([1, 1, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cropped_padded_cache_forgets_the_padding_that_was_cropped(strategy, model):
    talk = conversation(strategy, model)
    talk.step([2, 1, 2], "left")
    rows = [list(row) for row in talk.rows]
    talk.step([1, 4, 2], "right")
    talk.cache.crop(-4)
    talk.rows = rows
    talk.step([4, 4, 4])
    talk.step([1, 2, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_that_come_unprepared_where_padding_was_cropped_are_tokens(strategy, model):
    talk = conversation(strategy, model)
    talk.step([1, 4, 2], "right")
    talk.cache.crop(-4)
    new = random_ids(3, 3)
    cached(model, new, talk.cache)
    talk.rows = [row[:7] + more.tolist() for row, more in zip(talk.rows, new, strict=True)]
    assert talk.cache.padding_mask is None
    talk.step([1, 3, 2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_snapshots_carry_padding_into_either_strategy(strategy, model):
    talk = conversation(strategy, model)
    talk.step([1, 4, 2], "right")
    snapshot, rows = talk.cache.snapshot(), [list(row) for row in talk.rows]
    talk.step([3, 1, 2])
    talk.cache.restore(snapshot)
    for cache in (talk.cache, *(snapshot.to_cache(name, batch_size=3, **options_of(name)) for name in STRATEGIES)):
        again = Conversation(model, cache, rows)
        again.step([1, 2, 1], "left")
        again.step([1, 1, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_selected_and_reordered_rows_take_their_padding_along(strategy, model):
    talk = conversation(strategy, model)
    talk.step([1, 4, 2], "right")
    talk.cache.reorder_cache(torch.tensor([2, 0, 0]))
    talk.rows = [list(talk.rows[row]) for row in (2, 0, 0)]
    talk.step([1, 2, 3])
    talk.cache.batch_select_indices(torch.tensor([False, True, True]))
    talk.rows = talk.rows[1:]
    talk.step([1, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_that_were_prepared_but_never_run_leave_no_trace(strategy, model):
    talk = conversation(strategy, model)
    talk.cache.prepare_inputs(*padded([[1], [2, 3], [4]], "left"))
    talk.step([2, 2, 2])
    assert talk.cache.padding_mask is None
    talk.step([1, 3, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_that_came_unprepared_behind_padding_count_as_tokens(strategy):
    cache = conversation(strategy, TINY_MODELS["llama"]()).cache
    model = TINY_MODELS["llama"]()
    inputs = cache.prepare_inputs(*padded([[1], [2, 3], [4]], "right"))
    model(**inputs._asdict(), **cache_argument(cache))
    cached(model, random_ids(3, 2), cache)
    assert cache.padding_mask.tolist()[0] == [True] * 8 + [False] + [True] * 2


@pytest.mark.parametrize("name", WITH_WINDOWS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_rows_on_windows_are_refused_and_even_rows_are_served(strategy, name):
    model = TINY_MODELS[name]()
    prefix = random_ids(1, 11)
    cache = filled(strategy, model, prefix).fork(batch_size=2)
    before = contents(cache)
    with pytest.raises(UnsupportedModelError, match="PrefixCachedModel"):
        cache.prepare_inputs(*padded([[1, 2], [3]], "right"))
    assert_unchanged(cache, before)
    suffixes = random_ids(2, 3)
    inputs = cache.prepare_inputs(suffixes, torch.ones(2, 14))
    logits = model(**inputs._asdict(), **cache_argument(cache)).logits
    whole = torch.cat([prefix.expand(2, -1), suffixes], dim=1)
    assert_exact(logits, model(input_ids=whole).logits[:, 11:])


@pytest.mark.parametrize(
    ("config", "first"), [(MptConfig(n_layers=1), 0), (RobertaConfig(num_hidden_layers=1), 2)], ids=["mpt", "roberta"]
)
def test_padded_rows_are_refused_where_positions_cannot_skip_padding(config, first):
    cache = hpc.PrefixDynamicCache(config=config)
    with pytest.raises(UnsupportedModelError, match=config.model_type):
        cache.prepare_inputs(*padded([[5, 6], [7]], "left"))
    assert cache.prepare_inputs([[5, 6], [7, 8]]).position_ids.tolist() == [[first, first + 1]] * 2


@pytest.mark.parametrize("name", ["roberta", "xmod"])
def test_positions_begin_behind_the_padding_id_where_the_model_counts_from_there(name):
    model = build_architecture(name)
    prefix, suffixes = random_ids(1, 7).clamp(min=5), random_ids(2, 3).clamp(min=5)
    whole = model(torch.cat([prefix.expand(2, -1), suffixes], dim=1)).logits
    cache = hpc.PrefixDynamicCache(config=model.config)
    logits = model(**cache.prepare_inputs(prefix)._asdict(), **cache_argument(cache)).logits
    assert_exact(logits, whole[:1, :7])
    batch = cache.fork(batch_size=2)
    assert_exact(model(**batch.prepare_inputs(suffixes)._asdict(), **cache_argument(batch)).logits, whole[:, 7:])
    wrapper = hpc.PrefixCachedModel(model, strategy="prefix-dynamic")
    assert_exact(wrapper.forward(suffixes, prefix=wrapper.prefill(prefix)).logits, whole[:, 7:])
    padding_id = model.config.pad_token_id
    suffixes[1, 1] = padding_id
    with pytest.raises(UnsupportedModelError, match=f"contain the padding id {padding_id}"):
        cache.fork(batch_size=2).prepare_inputs(suffixes)
    prefix[0, 3] = padding_id
    with pytest.raises(UnsupportedModelError, match=f"contain the padding id {padding_id}"):
        wrapper.forward(suffixes[:1], prefix=wrapper.prefill(prefix))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_that_calls_cached_tokens_padding_is_refused(strategy):
    talk = conversation(strategy, TINY_MODELS["llama"]())
    before = contents(talk.cache)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 4] = 0
    with pytest.raises(InputMismatchError, match="cached token 4 of row 1"):
        talk.cache.prepare_inputs(random_ids(3, 2), mask)
    assert_unchanged(talk.cache, before)
    talk.step([1, 2, 1])


def test_a_row_without_any_token_is_refused():
    cache = new_cache("prefix-dynamic", TINY_MODELS["llama"]())
    with pytest.raises(InputMismatchError, match="row 1 without any token"):
        cache.prepare_inputs(torch.tensor([[1, 2], [0, 0]]), torch.tensor([[1, 1], [0, 0]]))


def test_masks_of_static_caches_reach_to_their_last_place():
    cache = filled("prefix-static", TINY_MODELS["llama"](), random_ids(1, 7), room=20)
    inputs = cache.prepare_inputs(random_ids(1, 2))
    assert inputs.attention_mask.tolist() == [[1] * 9 + [0] * 11]
    assert inputs.position_ids.tolist() == [[7, 8]]
