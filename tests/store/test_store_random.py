"""Random runs of operations against a plain list of what was stored, checked after every one."""

import random
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_prefixes import FULL, MIXED, RUNNING, SLIDING, check_exact, held_bytes, longest_exact, make_snapshot

from hf_prefix_cache.store import PrefixStore, memory_tier, page

KINDS = [FULL, SLIDING, MIXED, RUNNING]


@pytest.fixture
def _small_pages(monkeypatch):
    """Let runs of tens of tokens span several pages."""
    monkeypatch.setattr(page, "PAGE_TOKENS", 4)


def random_prompt(rng, known):
    """Return a prompt that continues, shortens or leaves one of ``known``, or a new one."""
    start = list(rng.choice(known)) if known and rng.random() < 0.8 else []
    start = start[: rng.randint(0, len(start))] if rng.random() < 0.6 else start
    return start[:40] + [rng.randrange(3) for _ in range(rng.randint(0 if start else 1, 10))]


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("kinds", KINDS)
def test_without_pressure_a_match_is_the_longest_that_any_stored_prefix_allows(kinds):
    rng = random.Random(0)
    store = PrefixStore(max_bytes=10_000_000)
    stored = {"": [], "tenant": []}
    for _ in range(1_000):
        namespace = rng.choice(list(stored))
        known = [snapshot.input_ids[0].tolist() for snapshot in stored[namespace]]
        tokens = random_prompt(rng, known)
        if rng.random() < 0.1 and len(known) < 15:
            retained = rng.choice([None, 12])
            snapshot = make_snapshot(tokens, kinds, retained=retained, logits=rng.random() < 0.5)
            if tokens not in known:  # a prefix stored twice keeps the windows that it was stored with first
                stored[namespace].append(snapshot)
            assert store.insert(stored[namespace][known.index(tokens)] if tokens in known else snapshot, namespace)
        else:
            found = store.match(tokens, "model", namespace)
            assert (0 if found is None else found.seq_length) == longest_exact(stored[namespace], tokens)
            if found is not None:
                check_exact(found, tokens, kinds)
        store.sanity_check()
        assert len(store) == sum(len(snapshots) for snapshots in stored.values())
    assert store.stats().misses + store.stats().partial_hits + store.stats().hits > 500


@pytest.mark.usefixtures("_small_pages")
@pytest.mark.parametrize("kinds", KINDS)
def test_under_pressure_everything_given_is_exact_and_the_budget_holds(kinds):
    rng = random.Random(1)
    store = PrefixStore(max_bytes=6_000)
    inserted = []
    for _ in range(1_000):
        action = rng.random()
        tokens = random_prompt(rng, [snapshot.input_ids[0].tolist() for snapshot in inserted[-20:]])
        if action < 0.45:
            snapshot = make_snapshot(
                tokens, kinds, logits=rng.random() < 0.2, fingerprint=rng.choice(["model", "new"])
            )
            if store.insert(snapshot):
                inserted.append(snapshot)
                store.sanity_check()
                assert store.match(tokens, snapshot.fingerprint).seq_length == len(tokens)
        elif action < 0.9:
            found = store.match(tokens, "model")
            possible = [snapshot for snapshot in inserted if snapshot.fingerprint == "model"]
            assert (0 if found is None else found.seq_length) <= longest_exact(possible, tokens)
            if found is not None:
                check_exact(found, tokens, kinds)
        elif action < 0.98:
            wanted, before = rng.randrange(1_500), store.nbytes
            freed = store.evict(wanted)
            assert freed == before - store.nbytes
            assert freed >= min(wanted, before)
        elif action < 0.99:
            store.discard("new")
            assert store.match(tokens, "new") is None
        else:
            store.clear()
            assert (store.nbytes, len(store)) == (0, 0)
        store.sanity_check()
        assert held_bytes(store) == store.nbytes <= store.max_bytes
    assert store.stats().evictions > 50


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.sampled_from(KINDS),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8),
    asked=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=4),
    freed=st.integers(0, 800),
)
def test_any_few_prefixes_are_matched_as_one_by_one_and_evicted_without_a_trace(kinds, prompts, asked, freed):
    store = PrefixStore(max_bytes=1_000_000)
    stored = {tuple(tokens): make_snapshot(tokens, kinds) for tokens in prompts}
    for snapshot in stored.values():
        store.insert(snapshot)
        store.sanity_check()
    for tokens in [*asked, *prompts]:
        found = store.match(tokens, "model")
        assert (0 if found is None else found.seq_length) == longest_exact(list(stored.values()), tokens)
        if found is not None:
            check_exact(found, tokens, kinds)
    store.evict(freed)
    store.sanity_check()
    for tokens in prompts:
        found = store.match(tokens, "model")
        if found is not None:
            check_exact(found, tokens, kinds)


@pytest.fixture
def _frequent_switches():
    """Let threads interrupt each other as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_small_pages", "_frequent_switches")
@pytest.mark.parametrize("kinds", [FULL, MIXED])
def test_four_threads_leave_the_store_consistent_and_get_exact_prefixes(kinds):
    store = PrefixStore(max_bytes=6_000)
    prompts = [[index % 3] * (index % 5) + [index % 2, *range(index, index + 12)] for index in range(12)]
    snapshots = [make_snapshot(tokens, kinds) for tokens in prompts]
    failures = []
    ready = threading.Barrier(4)

    def work(seed):
        rng = random.Random(seed)
        held = []
        try:
            ready.wait()
            for step in range(250):
                index = rng.randrange(len(prompts))
                if rng.random() < 0.4:
                    store.insert(snapshots[index])
                elif rng.random() < 0.8:
                    found = store.match(prompts[index], "model")
                    if found is not None:
                        held.append((found, prompts[index]))
                else:
                    store.evict(rng.randrange(800))
                if step % 25 == 0:
                    store.sanity_check()
            for found, tokens in held:
                check_exact(found, tokens, kinds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.sanity_check()
    stats = store.stats()
    assert stats.hits + stats.partial_hits + stats.misses > 200
    assert stats.evictions > 20


@pytest.mark.parametrize(
    "other",
    [
        lambda store: store.match([1, 2, 3], "model"),
        lambda store: store.insert(make_snapshot([1, 2, 9])),
        lambda store: store.evict(1),
        lambda store: store.discard("model"),
        lambda store: store.clear(),
        lambda store: store.stats(),
        lambda store: store.sanity_check(),
    ],
    ids=["match", "insert", "evict", "discard", "clear", "stats", "sanity_check"],
)
def test_nobody_sees_an_insertion_half_done(other, monkeypatch):
    store = PrefixStore(max_bytes=10_000)
    store.insert(make_snapshot([1, 2]))
    copying, may_go_on, done = threading.Event(), threading.Event(), threading.Event()
    copy_blocks = memory_tier.copy_blocks

    def copy_slowly(*args):
        if not copying.is_set():
            copying.set()
            assert may_go_on.wait(10)
        return copy_blocks(*args)

    monkeypatch.setattr(memory_tier, "copy_blocks", copy_slowly)
    inserter = threading.Thread(target=lambda: store.insert(make_snapshot([1, 2, 3])))
    inserter.start()
    assert copying.wait(10)
    visitor = threading.Thread(target=lambda: (other(store), done.set()))
    visitor.start()
    assert not done.wait(0.05)
    may_go_on.set()
    inserter.join()
    visitor.join()
    assert done.is_set()
    store.sanity_check()
