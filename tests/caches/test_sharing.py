"""What is stored once, what grows in place, what stays at its address, and what is freed."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from cache_oracles import (
    STRATEGIES,
    addresses,
    assert_exact,
    assert_unchanged,
    cached,
    contents,
    filled,
    new_cache,
    random_ids,
    uncached,
)
from transformers import DynamicCache, LlamaConfig, MistralConfig

import hf_prefix_cache as hpc
from tiny_models import TINY_MODELS

# Two layers of two heads of four numbers: 128 bytes a token.
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8, "head_dim": 4}
CONFIG = LlamaConfig(**SIZES)
TOKEN_BYTES = 2 * 2 * 2 * 4 * 4


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def feed(cache, tokens, rows=1):
    for layer in range(len(cache.layers)):
        cache.update(torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 4), layer)


@pytest.fixture
def prefix():
    cache = hpc.PrefixDynamicCache(config=CONFIG)
    feed(cache, 800)
    return cache


@contextmanager
def without_collector():
    """What is freed here is freed by the last reference, not by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_64_forks_of_800_tokens_retain_their_own_suffixes_plus_5_percent(prefix):
    alone = prefix.nbytes
    assert alone <= 1.05 * 800 * TOKEN_BYTES
    forks = [prefix.fork() for _ in range(64)]
    assert hpc.total_nbytes([prefix, *forks]) == alone
    for step in (37, 1, 1, 1, 60):
        for fork in forks:
            feed(fork, step)
    added = hpc.total_nbytes([prefix, *forks]) - alone
    assert 64 * 100 * TOKEN_BYTES <= added <= 1.05 * 64 * 100 * TOKEN_BYTES


def test_one_fork_of_64_rows_retains_its_own_suffixes_plus_5_percent(prefix):
    alone = prefix.nbytes
    batch = prefix.fork(batch_size=64)
    assert hpc.total_nbytes([prefix, batch]) == alone
    for step in (37, 1, 1, 1, 60):
        feed(batch, step, rows=64)
    added = hpc.total_nbytes([prefix, batch]) - alone
    assert 64 * 100 * TOKEN_BYTES <= added <= 1.05 * 64 * 100 * TOKEN_BYTES
    assert batch.fork().nbytes == batch.nbytes


def test_repeating_a_single_row_stores_it_once(prefix):
    alone = prefix.nbytes
    prefix.batch_repeat_interleave(16)
    assert prefix.nbytes == alone
    feed(prefix, 10, rows=16)
    assert prefix.nbytes - alone <= 1.05 * 16 * 10 * TOKEN_BYTES


def test_reordering_a_batch_copies_own_tokens_and_not_the_shared_prefix(prefix):
    batch = prefix.fork(batch_size=4)
    feed(batch, 3, rows=4)
    shared = {tensor.data_ptr() for tensor in prefix.tensors}
    batch.reorder_cache(torch.tensor([3, 3, 0, 1]))
    assert shared <= {tensor.data_ptr() for tensor in batch.tensors}


@pytest.mark.parametrize("config", [CONFIG, MistralConfig(**SIZES, sliding_window=400)], ids=["full", "sliding"])
def test_an_unshared_cache_grows_in_place(config):
    cache = hpc.PrefixDynamicCache(config=config)
    feed(cache, 100)
    moves, address = 0, cache.tensors[0].data_ptr()
    for _ in range(1_000):
        feed(cache, 1)
        now = cache.tensors[0].data_ptr()
        moves, address = moves + (now != address), now
    # 5 % of spare room: from 100 to 1,100 tokens take log(11) / log(1.05) = 49 moves, a window one in 20 tokens.
    assert moves <= 65
    held = min(1_100, getattr(config, "sliding_window", None) or 1_100)
    assert cache.nbytes <= 1.06 * held * TOKEN_BYTES


def test_the_first_steps_of_a_fork_seldom_move_what_it_holds(prefix):
    fork = prefix.fork(batch_size=3)
    moves, address = 0, None
    for _ in range(64):
        feed(fork, 1, rows=3)
        now = fork.layers[0].tensors()[-1].data_ptr()
        moves, address = moves + (now != address), now
    assert moves <= 26
    assert fork.nbytes - prefix.nbytes <= 3 * (64 + 8) * TOKEN_BYTES


def test_growth_after_a_snapshot_or_fork_writes_behind_what_they_see_without_copying(prefix):
    snapshot, fork = prefix.snapshot(), prefix.fork()
    before, forked = contents(snapshot), contents(fork)
    address = prefix.tensors[0].data_ptr()
    feed(prefix, 20)
    assert prefix.tensors[0].data_ptr() == address
    assert_unchanged(snapshot, before)
    assert_unchanged(fork, forked)


def test_growth_after_a_crop_below_a_snapshot_leaves_the_snapshot_as_it_is(prefix):
    snapshot = prefix.snapshot()
    before = contents(snapshot)
    prefix.crop(-10)
    fork = prefix.fork()
    feed(prefix, 5)
    feed(fork, 12)
    assert_unchanged(snapshot, before)
    assert (prefix.seq_length, fork.seq_length, snapshot.seq_length) == (795, 802, 800)


def test_snapshots_of_a_growing_cache_cost_nothing(prefix):
    feed(prefix, 5)
    snapshots = [prefix.snapshot()]
    for _ in range(10):
        feed(prefix, 1)
        snapshots.append(prefix.snapshot())
    assert hpc.total_nbytes([prefix, *snapshots]) == prefix.nbytes


def test_a_sliding_layer_stores_no_more_than_its_window_of_a_long_prefill():
    cache = hpc.PrefixDynamicCache(config=MistralConfig(**SIZES, sliding_window=100))
    feed(cache, 5_000)
    assert cache.nbytes <= 1.05 * 100 * TOKEN_BYTES
    feed(cache, 3_000)
    assert cache.nbytes <= 1.05 * 100 * TOKEN_BYTES
    assert cache.seq_length == 8_000


def test_total_nbytes_counts_logits_and_ids_of_snapshots_too(prefix):
    logits = torch.zeros(1, 1_000)
    snapshot = prefix.snapshot(input_ids=torch.zeros(800, dtype=torch.int64), next_logits=logits)
    assert hpc.total_nbytes([prefix, snapshot]) == prefix.nbytes + logits.nbytes + 800 * 8
    assert snapshot.nbytes == hpc.total_nbytes([snapshot])


def test_a_compact_snapshot_shares_nothing_and_has_no_spare_room(prefix):
    prefix.crop(-300)
    snapshot = prefix.snapshot()
    compact = snapshot.compact()
    assert compact.nbytes == 500 * TOKEN_BYTES
    assert hpc.total_nbytes([snapshot, compact]) == prefix.nbytes + compact.nbytes
    for tight, held in zip(compact.tensors, snapshot.tensors, strict=True):
        assert torch.equal(tight, held)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_static_operations_keep_their_addresses(name):
    model = TINY_MODELS[name]()
    cache = new_cache("prefix-static", model, max_batch_size=4)
    cached(model, random_ids(2, 11), cache)
    places = addresses(cache)
    lengths = [layer.cumulative_length.data_ptr() for layer in cache.layers]
    snapshot = cache.snapshot()
    cached(model, random_ids(2, 1), cache)
    cache.crop(-1)
    cache.restore(snapshot)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cached(model, random_ids(2, 3), cache)
    cache.reset()
    cached(model, random_ids(3, 12), cache)
    assert addresses(cache) == places
    assert [layer.cumulative_length.data_ptr() for layer in cache.layers] == lengths


def test_a_snapshot_of_static_buffers_is_a_copy_of_the_tokens_held():
    model = TINY_MODELS["llama"]()
    cache = filled("prefix-static", model, random_ids(1, 5), room=100)
    snapshot = cache.snapshot()
    assert snapshot.nbytes == cache.nbytes * 5 // 100
    assert not {tensor.data_ptr() for tensor in cache.tensors} & {tensor.data_ptr() for tensor in snapshot.tensors}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lengths_in_snapshots_are_plain_ints_that_stay(strategy):
    model = TINY_MODELS["gemma3_text"]()
    cache = filled(strategy, model, random_ids(1, 11))
    snapshot = cache.snapshot()
    cached(model, random_ids(1, 4), cache)
    numbers = [snapshot.seq_length, snapshot.batch_size, *(layer.length for layer in snapshot.layers)]
    assert numbers == [11, 1, 11, 11]
    assert all(type(number) is int for number in numbers)
    assert type(cache.seq_length) is int
    assert int(cache.get_seq_length()) == cache.seq_length == 15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropping_the_last_reference_frees_the_tensors(strategy):
    model = TINY_MODELS["gemma3_text"]()
    cache = filled(strategy, model, random_ids(1, 11))
    snapshot, forks = cache.snapshot(), [cache.fork(), cache.fork(batch_size=3)]
    for fork in forks:
        cached(model, random_ids(fork.rows, 2), fork)
    held = [weakref.ref(tensor) for holder in (cache, snapshot, *forks) for tensor in holder.tensors]
    with without_collector():
        del cache, forks, fork
        kept = {id(tensor) for tensor in snapshot.tensors}
        assert {id(reference()) for reference in held if reference() is not None} <= kept
        del snapshot
        assert not [reference for reference in held if reference() is not None]


def test_unsharing_lets_a_restored_cache_grow_in_place_and_leaves_the_snapshot(prefix):
    snapshot = prefix.snapshot()
    before = contents(snapshot)
    cache = snapshot.to_cache(batch_size=2)
    cache.unshare()
    feed(cache, 1, rows=2)
    address = cache.tensors[0].data_ptr()
    for _ in range(20):
        feed(cache, 1, rows=2)
    assert cache.tensors[0].data_ptr() == address
    assert_unchanged(snapshot, before)
    assert not {tensor.data_ptr() for tensor in cache.tensors} & {tensor.data_ptr() for tensor in prefix.tensors}


def test_unsharing_copies_with_the_next_tokens_and_only_once(prefix):
    cache = prefix.fork(batch_size=2)
    cache.unshare()
    assert cache.nbytes == prefix.nbytes
    feed(cache, 3, rows=2)
    address, held = cache.tensors[0].data_ptr(), 2 * (prefix.seq_length + 3) * TOKEN_BYTES
    assert held <= cache.nbytes <= 1.06 * held  # with room for what comes
    feed(cache, 5, rows=2)
    assert cache.tensors[0].data_ptr() == address


def test_what_was_attended_to_apart_is_let_go_once_it_is_unshared():
    model = TINY_MODELS["llama"]()
    cache = filled("prefix-dynamic", model, random_ids(1, 12))
    cache = cache.fork(batch_size=2)
    with cache.attend_shared():
        cached(model, random_ids(2, 3), cache)
    shared = [weakref.ref(tensor) for layer in cache.layers for tensor in layer.tensors()[:2]]
    cache.unshare()
    with without_collector():
        cached(model, random_ids(2, 1), cache)
        assert not [reference for reference in shared if reference() is not None]


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("change", ["snapshot", "crop", "select", "repeat"])
def test_what_happens_between_unsharing_and_the_next_tokens_counts(architecture, change):
    model = TINY_MODELS[architecture]()
    prompt, own = random_ids(1, 12), random_ids(2, 4)
    cache = filled("prefix-dynamic", model, prompt).fork(batch_size=2)
    cached(model, own, cache)
    cache.unshare()
    rows = torch.cat([prompt.expand(2, -1), own], dim=1)
    if change == "snapshot":
        other = cache.snapshot().to_cache(batch_size=2)
        cached(model, random_ids(2, 5), other)
    elif change == "crop":
        cache.crop_to(15)
        rows = rows[:, :15]
    elif change == "select":
        cache.batch_select_indices(torch.tensor([1]))
        rows = rows[1:]
    else:
        cache.batch_repeat_interleave(2)
        rows = rows.repeat_interleave(2, dim=0)
    for tokens in (3, 1, 40):
        end = random_ids(len(rows), tokens)
        rows = torch.cat([rows, end], dim=1)
        assert_exact(cached(model, end, cache), uncached(model, rows)[:, -tokens:])


def test_plain_caches_of_transformers_repeat_what_a_fork_shares(prefix):
    plain = DynamicCache(config=CONFIG)
    feed(plain, 800)
    plain.batch_repeat_interleave(64)
    repeated = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert repeated == 64 * 800 * TOKEN_BYTES > 60 * prefix.fork(batch_size=64).nbytes


def test_a_prefix_is_shared_by_forks_of_forks():
    model = TINY_MODELS["llama"]()
    text = random_ids(1, 20)
    expected = uncached(model, text)
    cache = new_cache("prefix-dynamic", model)
    for position in range(0, 20, 4):
        cache = cache.fork()
        assert_exact(cached(model, text[:, position : position + 4], cache), expected[:, position : position + 4])
    assert cache.nbytes == filled("prefix-dynamic", model, text[:, :4]).nbytes * 5


def test_total_nbytes_counts_transformers_own_caches_and_refuses_what_is_no_cache():
    plain = DynamicCache()
    plain.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert hpc.total_nbytes([plain, plain]) == 2 * 2 * 3 * 4 * 4
    with pytest.raises(hpc.InputMismatchError, match="int"):
        hpc.total_nbytes([3])
