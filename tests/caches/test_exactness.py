"""Logits on a reused prefix equal those of plain, uncached Transformers at every split point."""

import pytest
import torch
from cache_oracles import (
    LENGTH,
    ROOM,
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
    uncached,
)

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument
from hf_prefix_cache.exceptions import NotCroppableError
from tiny_models import TINY_MODELS, WINDOW

SUFFIXES = (1, 2, 5)
SPLITS = range(1, LENGTH)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=WITHOUT_WINDOWS + WITH_WINDOWS)
def known(request):
    """A model, a text, and at each split three suffixes with their uncached logits; the first continues the text."""
    model = TINY_MODELS[request.param]()
    torch.manual_seed(0)
    text = random_ids(1, LENGTH + max(SUFFIXES))
    suffixes, expected = {}, {}
    with torch.no_grad():
        for split in SPLITS:
            suffixes[split] = random_ids(3, max(SUFFIXES))
            suffixes[split][0] = text[0, split : split + max(SUFFIXES)]
            whole = torch.cat([text[:, :split].expand(3, -1), suffixes[split]], dim=1)
            expected[split] = model(input_ids=whole).logits[:, split:]
    return model, text, suffixes, expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_snapshot_fork_crop_and_restore_equal_the_uncached_forward_at_every_split(known, strategy):
    model, text, suffixes, expected = known
    cache = new_cache(strategy, model)
    has_windows = any(layer.window for layer in cache.layers)
    for split in SPLITS:
        cache.reset()
        cached(model, text[:, :split], cache)
        snapshot = cache.snapshot()
        before = contents(snapshot)
        for tokens in SUFFIXES:
            rows, answers = suffixes[split][:, :tokens], expected[split][:, :tokens]
            batch = cache.fork().fork(batch_size=3)
            assert_exact(cached(model, rows, batch), answers)
            assert_exact(cached(model, rows[:1], cache), answers[:1])
            assert cache.seq_length == batch.seq_length == split + tokens
            # One token can always be taken back, any number while windows have not moved on.
            assert cache.can_crop_to(split) or (has_windows and tokens > 1 and split + tokens > WINDOW)
            if cache.can_crop_to(split):
                cache.crop(-tokens)
                assert cache.seq_length == split
                assert_exact(cached(model, rows[1:2], cache), answers[1:2])
            else:
                with pytest.raises(NotCroppableError):
                    cache.crop(-tokens)
            cache.restore(snapshot)
        assert_unchanged(snapshot, before)
        assert_exact(cached(model, suffixes[split][2:], cache), expected[split][2:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_of_unequal_suffixes_equal_the_uncached_forward_at_every_split(known, strategy):
    model, text, suffixes, expected = known
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    cache = new_cache(strategy, model)
    has_windows = any(layer.window for layer in cache.layers)
    for split in SPLITS:
        cache.reset()
        cached(model, text[:, :split], cache)
        width, on_the_left = max(SUFFIXES), split % 2
        ids, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
        for row, tokens in enumerate(SUFFIXES):
            where = slice(width - tokens, width) if on_the_left else slice(tokens)
            ids[row, where], mask[row, where] = suffixes[split][row, :tokens], 1
        if has_windows:  # which forbid padding between prefix and suffix
            logits = wrapped.forward(ids, prefix=cache, attention_mask=mask).logits
        else:
            batch = cache.fork(batch_size=3)
            logits = model(**batch.prepare_inputs(ids, mask)._asdict(), **cache_argument(batch)).logits
        for row, tokens in enumerate(SUFFIXES):
            assert_exact(logits[row, mask[row].bool()], expected[split][row, :tokens])
        assert cache.seq_length == split


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prefix_filled_by_one_strategy_continues_in_the_other(known, strategy):
    model, text, suffixes, expected = known
    other = STRATEGIES[1 - STRATEGIES.index(strategy)]
    for split in SPLITS[::4]:
        snapshot = filled(strategy, model, text[:, :split]).snapshot()
        crossed = snapshot.to_cache(other, **options_of(other))
        back = crossed.snapshot().to_cache(strategy, batch_size=3, **options_of(strategy))
        assert (crossed.strategy, back.strategy) == (other, strategy)
        assert_exact(cached(model, suffixes[split][:1], crossed), expected[split][:1])
        assert_exact(cached(model, suffixes[split], back), expected[split])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cropped_snapshot_continues_exactly_or_refuses(known, strategy):
    model, text, suffixes, expected = known
    whole = filled(strategy, model, text[:, :LENGTH]).snapshot()
    for split in SPLITS[::3]:
        if whole.can_crop_to(split):
            cache = whole.crop_to(split).to_cache(**options_of(strategy))
            assert_exact(cached(model, suffixes[split][:1], cache), expected[split][:1])
        else:
            assert any(layer.window for layer in whole.layers)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_small_steps_equal_one_uncached_forward(known, strategy):
    model, text, _, _ = known
    expected = uncached(model, text)
    cache, position = new_cache(strategy, model), 0
    for tokens in (3, 1, 1, 6, 2, 9, 1, 1, 1, 3):
        assert_exact(
            cached(model, text[:, position : position + tokens], cache), expected[:, position : position + tokens]
        )
        position += tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_keyword_that_the_release_knows_takes_the_cache(known, strategy):
    model, text, suffixes, expected = known
    snapshot = filled(strategy, model, text[:, :9]).snapshot()
    names = {"past_key_values", CACHE_ARGUMENT}
    for name in sorted(names):
        cache = snapshot.to_cache(**options_of(strategy))
        call = {**cache.prepare_inputs(suffixes[9][:1])._asdict(), name: cache}
        if name == CACHE_ARGUMENT:
            logits = model(**call).logits
        else:
            with pytest.warns(FutureWarning, match="past_key_values"):
                logits = model(**call).logits
        assert_exact(logits, expected[9][:1])


def test_static_caches_keep_room_for_what_is_tested():
    assert LENGTH + max(SUFFIXES) <= ROOM
