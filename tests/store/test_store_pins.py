"""Pins: what is pinned is never evicted, and what never fits is refused with its numbers."""

import pytest
from store_prefixes import FULL, MIXED, RUNNING, SLIDING, TOKEN_BYTES, check_exact, make_snapshot

from hf_prefix_cache.exceptions import CacheCapacityError
from hf_prefix_cache.store import PrefixStore

FULL_TOKEN = len(FULL) * TOKEN_BYTES


def run_of(length, start=0):
    return [start + index for index in range(length)]


@pytest.mark.parametrize("kinds", [FULL, SLIDING, MIXED, RUNNING])
def test_what_is_pinned_outlives_everything_else(kinds):
    store = PrefixStore(max_bytes=5_000)
    pinned = make_snapshot(run_of(12), kinds, logits=False)
    store.pin(pinned)
    for start in range(100, 900, 20):
        store.insert(make_snapshot(run_of(12, start), kinds))
        store.insert(make_snapshot(run_of(6) + run_of(6, start), kinds))
        store.sanity_check()
    check_exact(store.match(run_of(12), "model"), run_of(12), kinds)
    assert store.match(run_of(12), "model").seq_length == 12
    store.evict(10**9)
    store.sanity_check()
    assert store.match(run_of(12), "model").seq_length == 12
    assert store.stats().pinned == len(store) == 1
    assert store.unpin(pinned)
    store.evict(10**9)
    assert store.nbytes == store.stats().pinned == 0


def test_pins_are_counted():
    store = PrefixStore(max_bytes=100_000)
    snapshot = make_snapshot(run_of(5))
    store.pin(snapshot)
    store.pin(snapshot)
    assert store.unpin(snapshot)
    store.evict(10**9)
    assert len(store) == 1
    assert store.unpin(snapshot)
    assert not store.unpin(snapshot)
    store.evict(10**9)
    assert len(store) == 0
    assert not store.unpin(snapshot)


def test_a_longer_prefix_than_a_pinned_one_comes_and_goes():
    store = PrefixStore(max_bytes=100_000)
    store.pin(make_snapshot(run_of(10)))
    store.insert(make_snapshot(run_of(20)))
    store.insert(make_snapshot([*run_of(5), 999]))
    store.evict(1)
    store.sanity_check()
    store.evict(10**9)
    store.sanity_check()
    assert store.match(run_of(20), "model").seq_length == 10
    assert store.nbytes == 10 * FULL_TOKEN


def test_what_never_fits_is_refused_with_its_numbers():
    store = PrefixStore(max_bytes=10 * FULL_TOKEN)
    with pytest.raises(CacheCapacityError, match=rf"{11 * FULL_TOKEN} bytes .* {10 * FULL_TOKEN}"):
        store.pin(make_snapshot(run_of(11)))
    store.pin(make_snapshot(run_of(8)))
    with pytest.raises(CacheCapacityError, match="1 prefixes pinned"):
        store.pin(make_snapshot(run_of(5, start=500)))
    assert not store.insert(make_snapshot(run_of(3, start=500)))
    assert store.stats().refusals == 3
    assert store.insert(make_snapshot(run_of(2, start=500)))
    store.sanity_check()


def test_pins_are_gone_with_what_they_pinned():
    store = PrefixStore(max_bytes=100_000)
    store.pin(make_snapshot(run_of(5)))
    store.pin(make_snapshot(run_of(5), fingerprint="other"))
    store.discard("model")
    store.sanity_check()
    assert store.stats().pinned == 1
    store.clear()
    store.sanity_check()
    assert store.stats().pinned == 0


def test_a_tenant_pins_for_itself_only():
    store = PrefixStore(max_bytes=100_000)
    snapshot = make_snapshot(run_of(5))
    store.pin(snapshot, "tenant")
    assert not store.unpin(snapshot)
    assert store.match(run_of(5), "model") is None
    assert store.unpin(snapshot, "tenant")
