"""What a store holds: its bytes counted exactly, within its budget, freed at once, and nothing of the caller's."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from store_prefixes import (
    FULL,
    MIXED,
    RUNNING,
    SLIDING,
    TOKEN_BYTES,
    VOCABULARY,
    check_exact,
    held_bytes,
    held_tensors,
    make_snapshot,
)

from hf_prefix_cache.exceptions import (
    BatchSizeError,
    InputMismatchError,
    InvalidBudgetError,
    InvalidTokensError,
    SnapshotIncompleteError,
)
from hf_prefix_cache.layers import AttentionState, KeyValues
from hf_prefix_cache.storage import storage_bytes
from hf_prefix_cache.store import PrefixStore, memory_tier
from hf_prefix_cache.store.page import Page

FULL_TOKEN = len(FULL) * TOKEN_BYTES


@pytest.fixture
def without_collector():
    """Leave the garbage collector off, so that only what is freed at once is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run_of(length, start=0):
    return [start + index % 400 for index in range(length)]


def found_length(store, tokens):
    found = store.match(tokens, "model")
    return 0 if found is None else found.seq_length


def test_a_token_takes_exactly_the_bytes_of_its_keys_and_values():
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot(run_of(1_500)))
    assert store.nbytes == held_bytes(store) == 1_500 * FULL_TOKEN


@pytest.mark.parametrize("kinds", [FULL, SLIDING, MIXED, RUNNING])
def test_tokens_that_are_stored_already_are_not_stored_again(kinds):
    store = PrefixStore(max_bytes=10_000_000)
    conversation = run_of(700)
    store.insert(make_snapshot(conversation[:300], kinds, logits=True))
    before = store.nbytes
    longer = make_snapshot(conversation, kinds)
    store.insert(longer)
    at_end = storage_of(state for state in longer.layers if not state.is_sliceable)
    assert store.nbytes == held_bytes(store) == before + 400 * kinds.count(None) * TOKEN_BYTES + at_end
    store.insert(longer)
    assert store.nbytes == before + 400 * kinds.count(None) * TOKEN_BYTES + at_end
    store.sanity_check()


def storage_of(states):
    return sum(tensor.numel() * tensor.element_size() for state in states for tensor in state.tensors())


def test_spare_room_of_a_snapshot_does_not_enter_the_store():
    store = PrefixStore(max_bytes=10_000_000)
    snapshot = make_snapshot(run_of(10))
    roomy = []
    for layer in snapshot.layers:
        parts = [torch.cat([part, torch.zeros_like(part).repeat(1, 1, 50, 1)], dim=2) for part in layer.segments[0]]
        roomy.append(AttentionState((KeyValues(*parts).slice(0, 10),), 10))
    store.insert(replace(snapshot, layers=tuple(roomy)))
    assert held_bytes(store) == 10 * FULL_TOKEN


@pytest.mark.parametrize("kinds", [FULL, SLIDING, RUNNING])
def test_the_callers_snapshot_is_neither_changed_nor_kept(kinds, without_collector):
    store = PrefixStore(max_bytes=10_000_000)
    snapshot = make_snapshot(run_of(300), kinds, logits=True)
    copies = [tensor.clone() for tensor in snapshot.tensors]
    store.insert(snapshot)
    assert all(torch.equal(*pair) for pair in zip(snapshot.tensors, copies, strict=True))
    for tensor in snapshot.tensors:
        tensor.zero_()
    check_exact(store.match(run_of(300), "model"), run_of(300), kinds)
    references = [weakref.ref(tensor) for tensor in snapshot.tensors]
    del snapshot, tensor
    assert not any(reference() is not None for reference in references)


def test_what_was_used_least_recently_is_evicted_first():
    store = PrefixStore(max_bytes=30 * FULL_TOKEN)
    prompts = [run_of(10, start=start) for start in (0, 100, 200)]
    for prompt in prompts:
        store.insert(make_snapshot(prompt))
    store.match(prompts[0], "model")
    store.insert(make_snapshot(run_of(10, start=300)))
    store.sanity_check()
    assert [found_length(store, prompt) for prompt in prompts] == [10, 0, 10]
    assert store.stats().evictions == 1


def test_a_hit_on_a_branch_keeps_all_that_it_hangs_on():
    store = PrefixStore(max_bytes=40 * FULL_TOKEN)
    system = run_of(10)
    branches = [[*system, *run_of(10, start=start)] for start in (100, 200, 300)]
    for branch in branches:
        store.insert(make_snapshot(branch))
    store.match(branches[0], "model")
    store.insert(make_snapshot(run_of(20, start=500)))
    store.sanity_check()
    assert found_length(store, branches[0]) == 20
    assert [found_length(store, branch) for branch in branches[1:]] == [10, 10]


def test_a_part_of_a_page_that_is_evicted_frees_its_bytes():
    store = PrefixStore(max_bytes=10_000_000)
    tokens = run_of(200)
    store.insert(make_snapshot(tokens))
    other = [*tokens[:50], 999]
    store.insert(make_snapshot(other))
    store.match(other, "model")
    assert store.evict(1) == 150 * FULL_TOKEN
    store.sanity_check()
    assert store.nbytes == held_bytes(store) == 51 * FULL_TOKEN
    check_exact(store.match(tokens, "model"), tokens)
    check_exact(store.match(other, "model"), other)
    assert found_length(store, tokens) == 50


def test_a_part_of_a_page_of_one_head_in_one_layer_gets_storage_of_its_own_too():
    page = Page.of([[KeyValues(torch.rand(1, 1, 9, 3), torch.rand(1, 1, 9, 2))]], 9)
    part = page.first(4)
    assert storage_bytes(part.stacks) == part.nbytes == 4 * 4 * 5


def test_runs_that_are_joined_keep_the_strategy_that_filled_their_end():
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot([1, 2], strategy="prefix-static", logits=True))
    store.insert(make_snapshot([1, 2, 3], strategy="prefix-dynamic"))
    assert store.match([1, 2], "model").strategy == "prefix-static"
    store.match([1, 2, 3], "model")
    assert store.evict(1) == 4 * VOCABULARY
    store.sanity_check()
    assert store.match([1, 2, 3], "model").strategy == "prefix-dynamic"


def test_old_ends_of_a_conversation_with_windows_go_before_its_newest():
    snapshots = [make_snapshot(run_of(20 * turn), SLIDING) for turn in (1, 2, 3)]
    state_bytes = storage_of(snapshots[0].layers)
    store = PrefixStore(max_bytes=2 * state_bytes)
    for snapshot in snapshots:
        assert store.insert(snapshot)
        store.sanity_check()
    assert [found_length(store, run_of(20 * turn)) for turn in (1, 2, 3)] == [0, 40, 60]


def test_next_logits_count_and_are_the_first_to_go():
    store = PrefixStore(max_bytes=20 * FULL_TOKEN + 4 * VOCABULARY)
    store.insert(make_snapshot(run_of(10), logits=True))
    assert store.nbytes == held_bytes(store) == 10 * FULL_TOKEN + 4 * VOCABULARY
    store.insert(make_snapshot(run_of(10, start=100), logits=True))
    store.sanity_check()
    assert store.match(run_of(10), "model").next_logits is None
    assert store.match(run_of(10, start=100), "model").next_logits is not None


@pytest.mark.parametrize("kinds", [FULL, SLIDING, MIXED, RUNNING])
def test_a_snapshot_that_can_never_fit_is_refused_and_nothing_evicted_for_it(kinds):
    snapshot = make_snapshot(run_of(300), kinds, logits=True)
    kept = make_snapshot(run_of(5, start=500), kinds)
    needed = storage_bytes(tensor for tensor in snapshot.tensors if tensor is not snapshot.input_ids)
    needed -= sum(
        tensor.untyped_storage().nbytes() - tensor.numel() * tensor.element_size()
        for layer in snapshot.layers
        for tensor in layer.tensors()
    )
    store = PrefixStore(max_bytes=needed - 1)
    assert store.insert(kept)
    assert not store.insert(snapshot)
    assert store.stats().refusals == 1
    assert len(store) == 1
    exact = PrefixStore(max_bytes=needed)
    assert exact.insert(kept)
    assert exact.insert(snapshot)
    assert exact.nbytes == held_bytes(exact) == needed
    exact.sanity_check()


def test_a_conversation_that_outgrows_the_budget_with_its_branches_still_fits():
    store = PrefixStore(max_bytes=100 * FULL_TOKEN)
    tokens = run_of(99)
    assert store.insert(make_snapshot([*tokens[:60], *run_of(30, start=500)]))
    assert store.insert(make_snapshot([*tokens, 998]))
    store.sanity_check()
    check_exact(store.match(tokens, "model"), tokens)
    assert found_length(store, tokens) == 99


def test_room_for_a_prefix_is_not_made_at_the_expense_of_what_it_shares():
    store = PrefixStore(max_bytes=266 * FULL_TOKEN)
    store.insert(make_snapshot(run_of(256)))
    shared = [weakref.ref(tensor) for tensor in held_tensors(store)]
    store.insert(make_snapshot(run_of(10, start=100)))
    assert store.insert(make_snapshot(run_of(257)))
    assert all(reference() is not None for reference in shared)
    assert [found_length(store, run_of(257)), found_length(store, run_of(10, start=100))] == [257, 0]
    store.sanity_check()


@pytest.mark.parametrize("kinds", [FULL, SLIDING, RUNNING])
def test_evicted_tensors_are_freed_at_once(kinds, without_collector):
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot(run_of(300), kinds, logits=True))
    references = [weakref.ref(tensor) for tensor in held_tensors(store)]
    assert all(reference() is not None for reference in references)
    held = store.nbytes
    assert store.evict(held) == held
    assert not any(reference() is not None for reference in references)
    assert (store.nbytes, len(store)) == (0, 0)
    assert store.match(run_of(300), "model") is None
    assert store.evict(1) == 0


@pytest.mark.parametrize("remove", [PrefixStore.clear, lambda store: store.discard("model")])
@pytest.mark.parametrize("kinds", [FULL, MIXED])
def test_cleared_tensors_are_freed_at_once(kinds, remove, without_collector):
    store = PrefixStore(max_bytes=10_000_000)
    for cut in (100, 200, 300):
        store.insert(make_snapshot([*run_of(cut), 999], kinds, logits=True))
    references = [weakref.ref(tensor) for tensor in held_tensors(store)]
    remove(store)
    assert not any(reference() is not None for reference in references)
    store.sanity_check()


def test_a_dropped_store_is_freed_without_the_collector(without_collector):
    store = PrefixStore(max_bytes=10_000_000)
    for cut in (100, 200, 300):
        store.insert(make_snapshot([*run_of(cut), 999], MIXED))
    references = [weakref.ref(tensor) for tensor in held_tensors(store)]
    del store
    assert not any(reference() is not None for reference in references)


def test_a_prefix_in_use_outlives_its_eviction(without_collector):
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot(run_of(300)))
    found = store.match(run_of(300), "model")
    references = [weakref.ref(tensor) for layer in found.layers for tensor in layer.tensors()]
    store.clear()
    check_exact(found, run_of(300))
    del found
    assert not any(reference() is not None for reference in references)


def test_evict_frees_at_least_what_is_asked_for_and_no_more_than_the_last_run():
    store = PrefixStore(max_bytes=10_000_000)
    for start in (0, 100, 200):
        store.insert(make_snapshot(run_of(10, start=start)))
    assert store.evict(0) == 0
    assert store.evict() == 10 * FULL_TOKEN
    assert store.evict(10 * FULL_TOKEN + 1) == 20 * FULL_TOKEN
    store.sanity_check()


def test_discard_drops_one_model_state_in_all_namespaces_and_no_other():
    store = PrefixStore(max_bytes=10_000_000)
    for fingerprint in ("old", "new"):
        for namespace in ("", "tenant"):
            store.insert(make_snapshot([1, 2, 3], fingerprint=fingerprint), namespace)
    assert store.discard("old") == 6 * FULL_TOKEN
    store.sanity_check()
    assert store.match([1, 2], "old", "tenant") is None
    assert store.match([1, 2], "new", "tenant").seq_length == 2
    assert store.discard("unheard of") == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"input_ids": None}, SnapshotIncompleteError),
        ({"fingerprint": None}, SnapshotIncompleteError),
        ({"padding_mask": torch.tensor([[False, True, True]])}, SnapshotIncompleteError),
        ({"batch_size": 2}, BatchSizeError),
        ({"input_ids": torch.tensor([[1, 2]])}, InputMismatchError),
        ({"input_ids": torch.tensor([[1, 2, 5000]])}, InvalidTokensError),
        ({"layers": make_snapshot([1, 2]).layers}, InputMismatchError),
        ({"layers": make_snapshot([1, 2, 3], SLIDING, retained=1).layers}, InputMismatchError),
    ],
)
def test_snapshots_that_cannot_be_stored_raise_and_leave_the_store_as_it_was(changes, error):
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot([1, 2]))
    before = store.stats()
    with pytest.raises(error):
        store.insert(make_snapshot([1, 2, 3], **changes))
    assert store.stats() == before
    store.sanity_check()


@pytest.mark.parametrize("kinds", [FULL, MIXED])
def test_memory_that_runs_out_in_an_insertion_leaves_the_store_consistent(kinds, monkeypatch):
    store = PrefixStore(max_bytes=10_000_000)
    store.insert(make_snapshot(run_of(300), kinds))

    def run_out(*_):
        raise MemoryError

    for name in ("copy_blocks", "Boundary"):
        with monkeypatch.context() as patch:
            patch.setattr(memory_tier, name, run_out)
            with pytest.raises(MemoryError):
                store.insert(make_snapshot([*run_of(200), 999], kinds))
            with pytest.raises(MemoryError):
                store.insert(make_snapshot([900, 901], kinds, fingerprint="other"))
        store.sanity_check()
    assert len(store) == 1
    check_exact(store.match(run_of(300), "model"), run_of(300), kinds)


@pytest.mark.parametrize("value", [0, -1, 1.5, None, True, "1"])
def test_a_budget_that_is_not_a_positive_integer_is_refused(value):
    with pytest.raises(InvalidBudgetError, match="max_bytes"):
        PrefixStore(max_bytes=value)


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_bytes_to_evict_that_are_not_a_number_are_refused(value):
    with pytest.raises(InvalidBudgetError, match="nbytes"):
        PrefixStore(max_bytes=1).evict(value)
