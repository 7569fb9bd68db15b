"""Kernels for CUDA devices, without one: how they are chosen, called and left, and what PyTorch says they return."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_prefix_cache.attention import kernel_trial, kernels, kernels_cuda
from hf_prefix_cache.attention.kernels import attend
from hf_prefix_cache.attention.kernels_cuda import attend_efficiently, attend_flash, attend_fused
from hf_prefix_cache.attention.plain import attend_plainly

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _untried(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_trusted", {})


@pytest.fixture
def used(monkeypatch):
    """Names of the kernels used outside trials; both compute plainly on the CPU here."""
    names = []

    def fake(name):
        def kernel(query, keys, values, mask, scale):
            names.append(name)
            bias = None if mask is None else kernels_cuda._bias(mask, query, keys)
            return attend_plainly(query, keys, values, bias, scale)

        return kernel

    monkeypatch.setattr(kernels_cuda, "attend_flash", fake("flash"))
    monkeypatch.setattr(kernels_cuda, "attend_efficiently", fake("efficient"))
    return names


def _inputs(dtype=torch.float16, rows=2, heads=3, queries=37, tokens=13, dims=(16, 16), device="cpu"):
    shapes = ((queries, dims[0]), (tokens, dims[0]), (tokens, dims[1]))
    return tuple(torch.zeros(rows, heads, *shape, dtype=dtype, device=device) for shape in shapes)


def _mask(dtype, rows=1, queries=37, tokens=13):
    return torch.zeros(rows, 1, queries, tokens, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "dims", "masked", "expected"),
    [
        (torch.float16, (64, 64), False, "flash"),
        (torch.bfloat16, (256, 256), False, "flash"),
        (torch.bfloat16, (264, 264), False, "efficient"),
        (torch.float16, (64, 64), True, "efficient"),
        (torch.bfloat16, (192, 128), False, "efficient"),
        (torch.float32, (64, 64), False, "efficient"),
        (torch.float32, (20, 20), True, "efficient"),
        (torch.float16, (20, 20), False, None),
        (torch.float32, (18, 18), False, None),
        (torch.float16, (16, 12), False, None),
        (torch.float64, (64, 64), False, None),
    ],
)
def test_the_kernel_is_chosen_by_dtype_sizes_and_mask(dtype, dims, masked, expected, used):
    query, keys, values = _inputs(dtype, dims=dims)
    mask = _mask(dtype) if masked else None
    result = attend_fused(query, keys, values, mask, 0.25)
    assert (used[-1] if used else None) == expected
    assert (result is None) == (expected is None)
    if result is not None:
        for found, plain in zip(result, attend_plainly(query, keys, values, mask, 0.25), strict=True):
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_that_a_kernel_would_read_at_wrong_addresses_are_not_given_to_it(dtype, used):
    query, keys, values = _inputs(dtype)
    rows, heads, tokens, dim = keys.shape
    storage = torch.zeros(keys.numel() + 1, dtype=dtype)
    unfit = {
        "begins between": storage[1:].view(keys.shape),
        "odd strides": torch.zeros(rows, heads, tokens, dim + 1, dtype=dtype)[..., :dim],
        "last dimension apart": torch.zeros(rows, heads, dim, tokens, dtype=dtype).transpose(-1, -2),
        "another dtype": keys.double(),
        "no tokens": keys[:, :, :0],
    }
    for tensor in unfit.values():
        assert attend_fused(query, tensor, values, None, 0.25) is None
        assert attend_fused(query, keys, tensor, None, 0.25) is None
    mask = _mask(torch.float64 if dtype == torch.float32 else torch.float32)
    assert attend_fused(query, keys, values, mask, 0.25) is None
    assert not used
    # A cache with spare room, and a query as models shape it, are fit.
    room = torch.zeros(rows, heads, tokens + 5, dim, dtype=dtype)[:, :, :tokens]
    query = torch.zeros(rows, 37, heads, dim, dtype=dtype).transpose(1, 2)
    assert attend_fused(query, room, room, None, 0.25) is not None


def test_more_rows_than_a_launch_takes_are_left_to_the_plain_computation(used, monkeypatch):
    monkeypatch.setattr(kernels_cuda, "_MOST_BLOCKS", 4)
    assert attend_fused(*_inputs(rows=5), None, 0.25) is None
    assert attend_fused(*_inputs(heads=5), None, 0.25) is None
    assert attend_fused(*_inputs(rows=4, heads=4), None, 0.25) is not None


def test_kernels_that_the_user_switched_off_are_not_used(used):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert attend_fused(*_inputs(), None, 0.25) is not None
    assert set(used) == {"efficient"}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attend_fused(*_inputs(), None, 0.25) is None


def test_the_next_kernel_is_used_where_the_first_does_not_run(used, monkeypatch):
    def too_old(*arguments):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    monkeypatch.setattr(kernels_cuda, "attend_flash", too_old)
    assert attend_fused(*_inputs(), None, 0.25) is not None
    assert set(used) == {"efficient"}


def test_a_kernel_that_fails_after_its_trial_is_left_and_not_used_again(monkeypatch):
    calls = []

    def fails_on_many(query, *rest):
        calls.append(query.shape[2])
        if query.shape[2] > 200:
            raise RuntimeError("invalid configuration argument")
        return attend_plainly(query, *rest)

    monkeypatch.setattr(kernels_cuda, "attend_efficiently", fails_on_many)
    many = _inputs(torch.float32, queries=201)
    assert attend_fused(*many, None, 0.25) is None
    seen = len(calls)
    assert attend_fused(*many, None, 0.25) is None
    assert len(calls) == seen

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels_cuda, "attend_efficiently", full)
    monkeypatch.setattr(kernels_cuda, "is_trusted", lambda kernel, case: True)
    with pytest.raises(torch.OutOfMemoryError):
        attend_fused(*_inputs(torch.float32), None, 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 13, 16])
@pytest.mark.parametrize("rows", [1, 2])
def test_masks_are_aligned_expanded_and_finite(rows, tokens, dtype):
    query, keys, _ = _inputs(dtype, tokens=tokens)
    mask = torch.randn(rows, 1, 37, tokens).to(dtype)
    mask[:, :, 3] = float("-inf")
    mask[:, :, 4] = torch.finfo(dtype).min
    bias = kernels_cuda._bias(mask, query, keys)
    assert bias.shape == (2, 3, 37, tokens)
    assert bias.dtype == dtype
    assert bias.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
    assert bias.data_ptr() % 16 == 0
    shown = [row for row in range(37) if row not in (3, 4)]
    assert torch.equal(bias[:, :, shown], mask[:, :, shown].expand(2, 3, -1, -1))
    # Also in the base-2 logarithms that the kernel computes with, in float32.
    assert (bias.float() * 1.4427).isfinite().all()
    assert (bias[:, :, 3:5] < -6e4).all()


@pytest.mark.parametrize("tokens", [1, 13, 16])
@pytest.mark.parametrize("queries", [1, 37, 64])
def test_pytorch_takes_the_calls_and_returns_a_log_sum_exp_of_each_query(queries, tokens):
    """By PyTorch's own descriptions of its kernels: no device is needed for the schema and the shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for dtype in (torch.float16, torch.bfloat16):
            query, keys, values = _inputs(dtype, queries=queries, tokens=tokens, device="cuda")
            output, log_sum = attend_flash(query, keys, values, None, 0.25)
            assert (output.shape, output.dtype) == (query.shape, dtype)
            assert (log_sum.shape, log_sum.dtype) == (query.shape[:3], torch.float32)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            query, keys, values = _inputs(dtype, queries=queries, tokens=tokens, dims=(16, 8), device="cuda")
            mask = torch.zeros(1, 1, queries, tokens, dtype=dtype, device="cuda")
            for given in (None, mask):
                output, log_sum = attend_efficiently(query, keys, values, given, 0.25)
                assert (output.shape, output.dtype) == ((*query.shape[:3], 8), dtype)
                assert (log_sum.shape, log_sum.dtype) == (query.shape[:3], torch.float32)


@pytest.fixture
def taken(monkeypatch):
    """The ways that `attend` takes; there is no fused kernel for the inputs."""
    names = []
    monkeypatch.setattr(kernels, "attend_fused", lambda *_: names.append("fused"))
    monkeypatch.setattr(kernels, "attend_plainly", lambda *_: names.append("plain"))
    return names


def _on_cuda(requires_grad=False):
    """Return what `attend` asks of a tensor: one with gradients cannot be made without a device."""
    return SimpleNamespace(device=torch.device("cuda", 0), shape=(2, 3, 37, 16), requires_grad=requires_grad)


def test_attend_asks_for_a_fused_kernel_on_cuda_devices_only(taken):
    attend(*_inputs(torch.float32), None, 0.25)
    assert taken == []
    attend(*_inputs(torch.float32, dims=(16, 8)), None, 0.25)
    assert taken == ["plain"]
    attend(_on_cuda(), _on_cuda(), _on_cuda(), None, 0.25)
    assert taken == ["plain", "fused", "plain"]


@pytest.mark.parametrize("place", range(3))
def test_attend_computes_plainly_with_gradients(place, taken):
    tensors = [_on_cuda(requires_grad=index == place) for index in range(3)]
    attend(*tensors, None, 0.25)
    assert taken == ["plain"]
    with torch.no_grad():
        attend(*tensors, None, 0.25)
    assert taken == ["plain", "fused", "plain"]


def test_attend_computes_plainly_while_torch_compile_traces(taken, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    attend(_on_cuda(), _on_cuda(), _on_cuda(), None, 0.25)
    assert taken == ["plain"]


def test_the_result_of_a_fused_kernel_is_what_attend_returns(monkeypatch):
    result = torch.zeros(1), torch.zeros(1)
    monkeypatch.setattr(kernels, "attend_fused", lambda *arguments: result)
    assert attend(_on_cuda(), _on_cuda(), _on_cuda(), None, 0.25) is result


def test_the_plain_computation_runs_on_a_cuda_device_in_its_dtypes():
    with FakeTensorMode():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            output, log_sum = attend_plainly(*_inputs(dtype, device="cuda", dims=(16, 8)), None, 0.25)
            assert (output.shape, output.dtype, output.device.type) == ((2, 3, 37, 8), dtype, "cuda")
            assert (log_sum.shape, log_sum.dtype) == ((2, 3, 37), torch.float32)
