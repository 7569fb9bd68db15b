"""The plain computation that every kernel has to agree with, against float64, sliced, hidden and with gradients."""

import pytest
import torch

from hf_prefix_cache.attention import plain, reference_attention, shared, shared_prefix_attention
from hf_prefix_cache.attention.kernels import attend, merge
from hf_prefix_cache.attention.plain import attend_plainly
from hf_prefix_cache.layers import KeyValues

LOWEST = torch.finfo(torch.float32).min
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def _inputs(rows=3, heads=2, queries=37, tokens=13, dims=(16, 8), dtype=torch.float32):
    shapes = ((queries, dims[0]), (tokens, dims[0]), (tokens, dims[1]))
    return tuple(torch.randn(rows, heads, *shape).to(dtype) for shape in shapes)


def _mask(rows, queries, tokens, hidden, dtype=torch.float32):
    """A mask that hides about half of the keys, but not the first one."""
    is_hidden = torch.rand(rows, 1, queries, tokens) > 0.5
    is_hidden[..., 0] = False
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill(is_hidden, hidden)


def _exact(query, keys, values, mask, scale):
    scores = query.double() @ keys.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask.double()
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("hidden", [None, float("-inf"), LOWEST], ids=["unmasked", "infinite", "lowest"])
@pytest.mark.parametrize("mask_rows", [1, 3])
@pytest.mark.parametrize("dtype", ALLOWED)
def test_output_and_log_sum_exp_equal_those_in_float64(dtype, mask_rows, hidden):
    query, keys, values = _inputs(dtype=dtype)
    mask = None
    if hidden is not None:
        mask = _mask(mask_rows, 37, 13, max(hidden, torch.finfo(dtype).min) if hidden == LOWEST else hidden, dtype)
    output, log_sum = attend_plainly(query, keys, values, mask, 0.4)
    expected, expected_sum = _exact(query, keys, values, mask, 0.4)
    assert output.dtype == dtype
    assert log_sum.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(output.double(), expected, atol=ALLOWED[dtype], rtol=0)
    # Scores are exact in float32 whatever the inputs.
    torch.testing.assert_close(log_sum.double(), expected_sum, atol=min(ALLOWED[dtype], 1e-5), rtol=0)


@pytest.mark.parametrize("mask_rows", [None, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 2**10, 2**12, 2**14])
def test_slices_of_rows_and_queries_give_the_same_and_keep_to_the_limit(most, dtype, mask_rows, monkeypatch):
    query, keys, values = _inputs(rows=5, dtype=dtype)
    mask = None if mask_rows is None else _mask(mask_rows, 37, 13, float("-inf"), dtype)
    expected = attend_plainly(query, keys, values, mask, 0.4)
    held, attend_once = [], plain._attend

    def note(part, keys, *rest):
        held.append((4 * part.shape[0] * part.shape[1] * part.shape[2] * keys.shape[2], part.shape[0] * part.shape[2]))
        return attend_once(part, keys, *rest)

    monkeypatch.setattr(plain, "_attend", note)
    monkeypatch.setattr(plain, "_MOST_BYTES", most)
    found = attend_plainly(query, keys, values, mask, 0.4)
    for result, wanted in zip(found, expected, strict=True):
        assert result.dtype == wanted.dtype
        # The same sums; a matrix product of another size may add up in another order.
        torch.testing.assert_close(result, wanted, atol=1e-6 if dtype == torch.float32 else 8e-3, rtol=0)
    assert len(held) > 1
    assert all(size <= most or queries == 1 for size, queries in held)


# `attend` is given the lowest number only: the kernel for CPUs takes the log of a sum over nothing for 0.
@pytest.mark.parametrize(
    ("kernel", "hidden"),
    [(attend_plainly, float("-inf")), (attend_plainly, LOWEST), (attend, LOWEST)],
    ids=["plain, infinite", "plain, lowest", "cpu, lowest"],
)
def test_a_query_that_sees_nothing_has_a_finite_output_and_counts_for_nothing(kernel, hidden):
    query, keys, values = _inputs(dims=(16, 16))
    mask = _mask(3, 37, 13, hidden)
    mask[1, :, 5] = hidden
    part = output, log_sum = kernel(query, keys, values, mask, 0.4)
    assert output.isfinite().all()
    assert log_sum.isfinite().all()
    assert (log_sum[1, :, 5] < -1e30).all()
    if hidden != LOWEST:
        assert (output[1, :, 5] == 0).all()
    other = kernel(query, *_inputs(tokens=9, dims=(16, 16))[1:], None, 0.4)
    for parts in ((part, other), (other, part), (part, other, part), (part, part, other)):
        merged = merge(parts)
        assert torch.equal(merged[1, :, 5], other[0][1, :, 5])
        assert merged.isfinite().all()
    for parts in ((part, part), (part, part, part)):
        assert merge(parts).isfinite().all()


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_parts_are_attention_over_all_keys(parts, dtype):
    query, keys, values = (tensor.to(dtype) for tensor in _inputs(dims=(16, 16), tokens=37))
    expected = attend_plainly(query.double(), keys.double(), values.double(), None, 0.4)[0]
    pieces = zip(keys.tensor_split(parts, dim=2), values.tensor_split(parts, dim=2), strict=True)
    merged = merge([attend(query, *piece, None, 0.4) for piece in pieces])
    assert merged.dtype == dtype
    torch.testing.assert_close(merged.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("kernel", [attend_plainly, attend], ids=["plain", "cpu"])
def test_gradients_pass_through_the_log_sum_exp(kernel, monkeypatch):
    """Merged attention has the gradients of the reference: fused kernels would lose those of the log-sum-exp."""
    monkeypatch.setattr(shared, "attend", kernel)
    mask = _mask(3, 2, 5, float("-inf"))
    mask[0, :, 1] = LOWEST
    gradients = []
    start = torch.randn(3, 4, 2, 16), *(torch.randn(rows, 2, tokens, 16) for rows, tokens in ((1, 9), (3, 5)) * 2)
    for compute in (shared_prefix_attention, reference_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in start]
        query, prefix_keys, own_keys, prefix_values, own_values = leaves
        levels = (KeyValues(prefix_keys, prefix_values),)
        output = compute(query, levels, KeyValues(own_keys, own_values), mask, 0.25)
        output.double().square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_sliced_gradients_are_those_of_the_whole(monkeypatch):
    start, gradients = _inputs(dims=(16, 16)), []
    for most in (2**28, 2**10):
        monkeypatch.setattr(plain, "_MOST_BYTES", most)
        leaves = [tensor.clone().requires_grad_() for tensor in start]
        output, log_sum = attend_plainly(*leaves, None, 0.4)
        (output.square().sum() + log_sum.square().sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)


def test_autocast_does_not_make_it_less_exact():
    query, keys, values = _inputs()
    expected = attend_plainly(query, keys, values, None, 0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend_plainly(query, keys, values, None, 0.4)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("most", [2**28, 2**9], ids=["whole", "sliced"])
@pytest.mark.parametrize("own_lengths", [(1, 1, 1, 1), (1, 7, 3, 5)], ids=["one token", "ragged"])
@pytest.mark.parametrize(
    ("heads", "key_heads"), [(4, 4), (6, 2), (8, 1)], ids=["multi-head", "grouped", "multi-query"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ragged_nested_trees_equal_the_reference(dtype, heads, key_heads, own_lengths, most, monkeypatch):
    """As on a device without a fused kernel: every level by the plain computation."""
    monkeypatch.setattr(shared, "attend", attend_plainly)
    monkeypatch.setattr(plain, "_MOST_BYTES", most)
    rows, width = len(own_lengths), max(own_lengths)

    def run(count, tokens):
        return KeyValues(*(torch.randn(count, key_heads, tokens, 16).to(dtype) for _ in range(2)))

    system, document, turn, own = run(1, 33), run(1, 9), run(rows, 4), run(rows, width)
    query = torch.randn(rows, heads, 1, 16).to(dtype)
    mask = torch.zeros(rows, 1, 1, width, dtype=dtype)
    for row, length in enumerate(own_lengths):
        mask[row, :, :, length:] = float("-inf")
    found = shared_prefix_attention(query, (system, document, turn), own, mask, 0.25)
    assert found.dtype == dtype
    for row, length in enumerate(own_lengths):
        pick = slice(row, row + 1)
        levels = (system, document, KeyValues(*(part[pick] for part in turn)))
        alone = KeyValues(*(part[pick, :, :length] for part in own))
        expected = reference_attention(query[pick], levels, alone, None, 0.25)
        torch.testing.assert_close(found[pick].double(), expected, atol=ALLOWED[dtype], rtol=0)
