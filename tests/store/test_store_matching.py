"""What a store finds: the longest prefix that it can give exactly, never another's."""

import pytest
import torch
from store_prefixes import FULL, MIXED, RUNNING, SLIDING, check_exact, held_tensors, logits_after, make_snapshot

from hf_prefix_cache.exceptions import BatchSizeError, InvalidTokensError
from hf_prefix_cache.store import PrefixStore


@pytest.fixture
def store():
    store = PrefixStore(max_bytes=10_000_000)
    yield store
    store.sanity_check()


def run_of(length, start=0):
    return [start + index % 400 for index in range(length)]


def test_a_stored_prefix_serves_any_length_of_it_bit_for_bit(store):
    tokens = run_of(1_000)
    store.insert(make_snapshot(tokens))
    for length in (1, 2, 255, 256, 257, 637, 999, 1_000):
        found = store.match([*tokens[:length], 999], "model")
        assert found.seq_length == length
        check_exact(found, tokens)


def test_a_prompt_shorter_than_what_is_stored_is_found_whole(store):
    store.insert(make_snapshot(run_of(50)))
    assert store.match(run_of(20), "model").seq_length == 20


def test_prefixes_that_diverge_are_each_found_whole(store):
    shared = run_of(300)
    prompts = [[*shared[:cut], *run_of(20, start=500)] for cut in (1, 100, 256, 299, 300)]
    for prompt in prompts:
        store.insert(make_snapshot(prompt))
        store.sanity_check()
    for prompt in prompts:
        found = store.match(prompt, "model")
        assert found.seq_length == len(prompt)
        check_exact(found, prompt)


def test_nothing_is_found_of_a_prompt_that_begins_otherwise(store):
    assert store.match([1, 2], "model") is None
    store.insert(make_snapshot([1, 2, 3]))
    assert store.match([2, 3], "model") is None


def test_a_match_copies_nothing(store):
    store.insert(make_snapshot(run_of(600)))
    held = {tensor.untyped_storage().data_ptr() for tensor in held_tensors(store)}
    for length in (600, 300):
        found = store.match(run_of(length), "model")
        assert {t.untyped_storage().data_ptr() for layer in found.layers for t in layer.tensors()} <= held


def test_a_path_cut_often_still_comes_in_one_segment_for_each_page(store):
    tokens = run_of(512)
    store.insert(make_snapshot(tokens))
    for cut in range(1, 512):
        store.insert(make_snapshot(tokens[:cut]))
    assert len(store) == 512
    found = store.match(tokens, "model")
    check_exact(found, tokens)
    assert len(found.layers[0].segments) == 2


def test_next_logits_come_only_where_a_snapshot_ended(store):
    tokens = run_of(40)
    store.insert(make_snapshot(tokens, logits=True))
    store.insert(make_snapshot(tokens[:30]))
    assert torch.equal(store.match(tokens, "model").next_logits, logits_after(tokens))
    assert torch.equal(store.match([*tokens, 7], "model").next_logits, logits_after(tokens))
    for length in (39, 30, 29):
        assert store.match(tokens[:length], "model").next_logits is None


def test_next_logits_are_added_to_a_prefix_stored_without_them(store):
    tokens = run_of(10)
    store.insert(make_snapshot(tokens))
    store.insert(make_snapshot(tokens, logits=True))
    store.insert(make_snapshot(tokens))
    assert torch.equal(store.match(tokens, "model").next_logits, logits_after(tokens))
    assert len(store) == 1


@pytest.mark.parametrize("kinds", [SLIDING, MIXED])
def test_a_window_that_moved_on_serves_its_end_and_one_token_less(store, kinds):
    tokens = run_of(60)
    store.insert(make_snapshot(tokens[:40], kinds))
    store.insert(make_snapshot(tokens, kinds))
    for length, expected in ((60, 60), (59, 59), (58, 40), (40, 40), (39, 39)):
        found = store.match([*tokens[:length], 999], "model")
        assert found.seq_length == expected
        check_exact(found, tokens, kinds)
    assert store.match([*tokens[:38], 999], "model") is None


def test_a_window_that_has_not_moved_on_serves_any_length(store):
    tokens = run_of(8)
    store.insert(make_snapshot(tokens, SLIDING))
    for length in range(1, 9):
        found = store.match([*tokens[:length], 999], "model")
        assert found.seq_length == length
        check_exact(found, tokens, SLIDING)


def test_windows_that_kept_more_than_they_need_serve_shorter_prefixes(store):
    tokens = run_of(40)
    store.insert(make_snapshot(tokens, SLIDING, retained=20))
    for length, expected in ((40, 40), (30, 30), (27, 27)):
        found = store.match([*tokens[:length], 999], "model")
        assert found.seq_length == expected
        check_exact(found, tokens, SLIDING)
    assert store.match([*tokens[:26], 999], "model") is None


def test_the_third_request_is_served_by_windows_on_the_branches_of_the_first_two(store):
    system = [1, 2, 3, 4]
    store.insert(make_snapshot([*system, 10, 11], SLIDING))
    store.insert(make_snapshot([*system, 20, 21], SLIDING))
    prompt = [*system, 30, 31]
    found = store.match(prompt, "model")
    assert found.seq_length == 4
    check_exact(found, prompt, SLIDING)


def test_a_running_state_serves_the_prefix_that_it_was_taken_after_and_no_other(store):
    tokens = run_of(40)
    store.insert(make_snapshot(tokens[:20], RUNNING, logits=True))
    store.insert(make_snapshot(tokens, RUNNING))
    for length, expected in ((40, 40), (39, 20), (21, 20), (20, 20)):
        found = store.match([*tokens[:length], 999], "model")
        assert found.seq_length == expected
        check_exact(found, tokens, RUNNING)
    assert store.match([*tokens[:19], 999], "model") is None


@pytest.mark.parametrize("kinds", [FULL, SLIDING])
def test_models_states_and_namespaces_are_never_matched_across(store, kinds):
    tokens = [1, 2, 3]
    store.insert(make_snapshot(tokens, kinds, fingerprint="one"), "alice")
    assert store.match(tokens, "one", "alice").seq_length == 3
    for fingerprint, namespace in (("one", ""), ("one", "bob"), ("two", "alice"), ("", "onealice")):
        assert store.match(tokens, fingerprint, namespace) is None


def test_a_lossy_prefix_is_given_only_to_its_own_strategy(store):
    store.insert(make_snapshot([1, 2, 3, 4], strategy="prefix-quantized", is_lossy=True))
    store.insert(make_snapshot([1, 2, 9], strategy="prefix-static"))
    exact = store.match([1, 2, 3, 4], "model")
    assert (exact.seq_length, exact.is_lossy, exact.strategy) == (2, False, "prefix-static")
    lossy = store.match([1, 2, 3, 4], "model", strategy="prefix-quantized")
    assert (lossy.seq_length, lossy.is_lossy, lossy.strategy) == (4, True, "prefix-quantized")
    assert store.match([1, 2, 9], "model", strategy="prefix-quantized").seq_length == 3
    assert store.match([1, 2, 3, 4], "model", strategy="prefix-dynamic").seq_length == 2


def test_one_prefix_never_mixes_dtypes(store):
    plain = make_snapshot([1, 2, 3])
    layers = tuple(
        type(layer)(tuple(type(part)(*(t.half() for t in part)) for part in layer.segments), layer.length)
        for layer in make_snapshot([1, 2, 3, 4, 5]).layers
    )
    store.insert(plain)
    store.insert(make_snapshot([1, 2, 3, 4, 5], layers=layers))
    found = store.match([1, 2, 3, 4, 5], "model")
    assert {tensor.dtype for layer in found.layers for tensor in layer.tensors()} == {torch.float16}
    assert found.seq_length == 5


def test_ids_may_be_a_list_a_row_or_a_batch_of_one_row(store):
    store.insert(make_snapshot([5, 6, 7]))
    for ids in ([5, 6, 8], (5, 6, 8), torch.tensor([5, 6, 8]), torch.tensor([[5, 6, 8]], dtype=torch.int32)):
        check_exact(store.match(ids, "model"), [5, 6])


def test_bad_ids_are_refused_and_the_store_is_unharmed(store):
    store.insert(make_snapshot([5, 6, 7]))
    before = store.stats()
    for ids, error in (
        ([], InvalidTokensError),
        ([1.5], InvalidTokensError),
        ([-1], InvalidTokensError),
        (torch.ones(2, 3, dtype=torch.long), BatchSizeError),
    ):
        with pytest.raises(error):
            store.match(ids, "model")
    assert store.stats() == before


def test_ids_of_a_match_do_not_change_with_the_callers(store):
    store.insert(make_snapshot([5, 6, 7]))
    ids = torch.tensor([5, 6, 7])
    found = store.match(ids, "model")
    ids.zero_()
    assert found.input_ids.tolist() == [[5, 6, 7]]
    assert store.match([5, 6, 7], "model").seq_length == 3


@pytest.mark.parametrize("kinds", [FULL, SLIDING, RUNNING])
def test_what_was_stored_in_inference_mode_can_be_trained_on(store, kinds):
    with torch.inference_mode():
        store.insert(make_snapshot([5, 6, 7], kinds, logits=True))
        found = store.match([5, 6, 7], "model")
    assert not any(tensor.is_inference() for tensor in found.tensors)


def test_statistics_count_what_was_asked_found_and_stored(store):
    store.insert(make_snapshot([1, 2, 3], logits=True))
    store.insert(make_snapshot([1, 2, 3, 4]))
    store.match([1, 2, 3, 4], "model")
    store.match([1, 2, 9, 9], "model")
    store.match([8, 8], "model")
    stats = store.stats()
    assert (stats.hits, stats.partial_hits, stats.misses) == (1, 1, 1)
    assert (stats.tokens_reused, stats.tokens_missed) == (6, 4)
    assert (stats.insertions, stats.refusals, stats.evictions) == (2, 0, 0)
    assert (stats.entries, stats.bytes, stats.max_bytes) == (2, store.nbytes, 10_000_000)
    assert len(store) == 2
