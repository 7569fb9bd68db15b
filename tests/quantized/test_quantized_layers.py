"""Every operation on a quantized layer against the oracle that decodes everything, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_oracles import FORMATS, OracleLayer, assert_equal, name_of, new_layer, random_tokens, scheme

WINDOWS = (None, 40, 150)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=FORMATS, ids=name_of)
def how(request):
    return scheme(**request.param)


@pytest.fixture(params=WINDOWS, ids=lambda window: f"window_{window}")
def window(request):
    return request.param


def both(how, window):
    return new_layer(how, window), OracleLayer(how, window)


def feed(layer, oracle, tokens, rows=1, dtype=torch.float32):
    keys, values = random_tokens(rows, tokens, dtype)
    shown, expected = layer.update(keys, values), oracle.update(keys, values)
    for now, then in zip(shown, expected, strict=True):
        torch.testing.assert_close(now, then, atol=0, rtol=0)
    assert_equal(layer, oracle)


def test_what_is_attended_to_and_held_is_the_oracles_at_every_step(how, window):
    layer, oracle = both(how, window)
    for tokens in (1, 39, 1, 1, 70, 1, 1, 1, 31, 200, 3, 1):
        feed(layer, oracle, tokens, rows=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_decoded_to_itself(how, dtype):
    layer, oracle = both(how, None)
    for tokens in (90, 1, 40):
        feed(layer, oracle, tokens, dtype=dtype)
        assert layer.keys.dtype == dtype


@pytest.mark.parametrize("length", [1, 3, 4, 34, 35, 36, 50, 66, 67, 68, 99, 100])
def test_crop_keeps_any_number_of_tokens_inside_groups_and_at_their_ends(how, length):
    layer, oracle = both(how, None)
    feed(layer, oracle, 101, rows=2)
    assert layer.can_crop_to(length)
    layer.crop_to(length)
    oracle.crop_to(length)
    assert_equal(layer, oracle)
    for tokens in (1, 40, 1, 45):
        feed(layer, oracle, tokens, rows=2)


def test_rows_are_reordered_repeated_and_selected_with_all_they_hold(how, window):
    layer, oracle = both(how, window)
    feed(layer, oracle, 101, rows=3)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    oracle.select([2, 2, 0])
    feed(layer, oracle, 2, rows=3)
    layer.batch_repeat_interleave(2)
    oracle.select([0, 0, 1, 1, 2, 2])
    feed(layer, oracle, 40, rows=6)
    layer.batch_select_indices(torch.tensor([True, False, False, True, False, True]))
    oracle.select([0, 3, 5])
    feed(layer, oracle, 40, rows=3)


def test_one_row_becomes_many_without_being_copied(how, window):
    layer, oracle = both(how, window)
    feed(layer, oracle, 101)
    before = [part.data_ptr() for run in layer.share().runs for part in run]
    layer.batch_repeat_interleave(4)
    oracle.select([0] * 4)
    for tokens in (3, 40):
        feed(layer, oracle, tokens, rows=4)
    if window is None:
        assert [part.data_ptr() for run in layer.state().runs for part in run][: len(before)] == before


def test_a_loaded_state_and_its_source_go_separate_ways(how, window):
    layer, oracle = both(how, window)
    feed(layer, oracle, 101)
    other, expected = both(how, window)
    other.load(layer.share(), 3)
    expected = oracle.fork()
    expected.select([0, 0, 0])
    for tokens in (1, 2, 40, 1):
        feed(layer, oracle, tokens)
        feed(other, expected, tokens, rows=3)


def test_groups_are_quantized_once_and_their_bytes_never_change(how):
    layer, oracle = both(how, None)
    feed(layer, oracle, 300)
    (first,) = layer.share().runs
    bits = [part.clone() for part in first]
    for tokens in [1] * 70:
        feed(layer, oracle, tokens)
    assert layer.state().runs[0].keys[0].data_ptr() == first.keys[0].data_ptr()
    assert all(torch.equal(part, then) for part, then in zip(first, bits, strict=True))


def test_own_groups_are_joined_so_that_runs_stay_few():
    layer, oracle = both(scheme(), None)
    for _ in range(8):
        feed(layer, oracle, 32)
    assert len(layer.state().runs) <= 3
    layer.share()  # from here on, what is held may be held by others too
    held = layer.state().runs
    for _ in range(3):
        feed(layer, oracle, 32)
    assert all(now is then for now, then in zip(layer.state().runs, held, strict=False))


def test_the_exact_tail_is_never_longer_than_the_residual(how):
    layer, _ = both(how, None)
    for tokens in [90, *[1] * 80]:
        layer.update(*random_tokens(1, tokens))
        state = layer.state()
        exact = [segment for segment in state.segments if segment not in state.runs]
        assert sum(segment.tokens for segment in exact) <= max(5, 31) + 3


def test_only_what_is_loaded_is_quantized_if_own_tokens_are_to_stay_exact(how):
    exact = new_layer(how, quantize_own=False)
    keys, values = random_tokens(1, 101)
    exact.update(keys, values)
    assert not exact.state().runs
    prefix = new_layer(how, quantize_own=False)
    from hf_prefix_cache.layers import AttentionState, KeyValues

    prefix.load(AttentionState((KeyValues(keys, values),), 101), 2)
    oracle = OracleLayer(how)
    oracle.update(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1))
    assert_equal(prefix, oracle)
    more = random_tokens(2, 80)
    prefix.update(*more)
    assert torch.equal(prefix.keys[:, :, 101:], more[0])
    again = new_layer(how, quantize_own=False)
    again.load(prefix.share(), 2)
    assert torch.equal(again.keys, prefix.keys)


def test_compact_row_and_select_of_a_state_hold_the_same_in_less_storage(how, window):
    layer, oracle = both(how, window)
    for tokens in (90, 40, 1):
        feed(layer, oracle, tokens, rows=2)
    layer.crop_to(130)
    oracle.crop_to(130)
    state = layer.state()
    assert torch.equal(state.compact().exact().compact().segments[0].keys, oracle.read()[0])
    assert sum(part.untyped_storage().nbytes() for part in state.compact().tensors()) <= sum(
        part.untyped_storage().nbytes() for part in state.tensors()
    )
    picked = state.select(torch.tensor([1])).exact().compact().segments[0]
    assert torch.equal(picked.values, oracle.read()[1][1:])
    hidden = 120
    row = state.row(1, hidden, hidden + 4)
    held = hidden - state.first
    expected = torch.cat([oracle.read()[0][1:, :, :held], oracle.read()[0][1:, :, held + 4 :]], dim=2)
    assert torch.equal(row.exact().compact().segments[0].keys, expected)
    assert row.length == 126


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(FORMATS),
    window=st.sampled_from(WINDOWS),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("feed"), st.integers(1, 90)),
            st.tuples(st.just("crop"), st.floats(0, 1)),
            st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
            st.tuples(st.just("fork"), st.just(0)),
        ),
        max_size=14,
    ),
)
def test_any_sequence_of_operations_keeps_to_the_oracle(form, window, steps):
    how = scheme(**form)
    layer, oracle = both(how, window)
    parents = []
    feed(layer, oracle, 60, rows=2)
    for name, value in steps:
        if name == "feed":
            feed(layer, oracle, value, rows=len(oracle.rows))
        elif name == "crop":
            length = max(1, int(value * oracle.length))
            if layer.can_crop_to(length):
                layer.crop_to(length)
                oracle.crop_to(length)
        elif name == "select":
            rows = [index % len(oracle.rows) for index in value]
            layer.reorder_cache(torch.tensor(rows))
            oracle.select(rows)
        else:
            parents.append((layer, oracle))
            child = new_layer(how, window)
            child.load(layer.share(), len(oracle.rows))
            layer, oracle = child, oracle.fork()
        assert_equal(layer, oracle)
    for parent, expected in parents:
        assert_equal(parent, expected)
