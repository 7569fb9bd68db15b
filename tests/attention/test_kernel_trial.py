"""A kernel is used only where it agrees with the plain computation in the output and in the log-sum-exp."""

import threading
import time

import pytest
import torch

from hf_prefix_cache.attention import kernel_trial
from hf_prefix_cache.attention.kernel_trial import KernelCase, distrust, is_trusted
from hf_prefix_cache.attention.plain import attend_plainly

CPU = torch.device("cpu")
CASES = [
    KernelCase(CPU, dtype, *dims, is_masked)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for dims in ((64, 64), (24, 16))
    for is_masked in (False, True)
]


@pytest.fixture(autouse=True)
def _untried(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_trusted", {})


def _agrees(query, keys, values, mask, scale):
    if mask is not None:
        mask = mask.clamp_min(-1e30 if mask.dtype != torch.float16 else -65504)
    return attend_plainly(query, keys, values, mask, scale)


def _wrong_output(*arguments):
    output, log_sum = _agrees(*arguments)
    return output * 1.05, log_sum


def _wrong_log_sum(*arguments):
    output, log_sum = _agrees(*arguments)
    return output, log_sum / torch.tensor(2.0).log()  # as if to base 2


def _raises(*arguments):
    raise RuntimeError("no kernel image is available")


def _no_number_where_all_is_hidden(query, keys, values, mask, scale):
    scores = query.float() @ keys.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask.float().masked_fill(mask < -6e4, float("-inf"))
    return (scores.softmax(-1) @ values.float()).to(query.dtype), scores.logsumexp(-1)


def _padded_log_sum(*arguments):
    output, log_sum = _agrees(*arguments)
    return output, torch.nn.functional.pad(log_sum, (0, 3))


def _ignores_the_mask(query, keys, values, mask, scale):
    return attend_plainly(query, keys, values, None, scale)


def _ignores_the_scale(query, keys, values, mask, scale):
    return _agrees(query, keys, values, mask, query.shape[-1] ** -0.5)


def _leaves_out_keys_beyond_a_block(query, keys, values, mask, scale):
    keys, values = keys[:, :, :1024], values[:, :, :1024]
    return _agrees(query, keys, values, None if mask is None else mask[..., :1024], scale)


def _as_tf32(query, keys, values, mask, scale):
    """Inputs with the 10 bits of mantissa that TF32 keeps."""
    coarse = [(part.view(torch.int32) & -(2**13)).view(torch.float32) for part in (query, keys, values)]
    return _agrees(*coarse, mask, scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_that_agrees_is_trusted(case):
    assert is_trusted(_agrees, case)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "kernel",
    [_wrong_output, _wrong_log_sum, _raises, _padded_log_sum, _ignores_the_scale, _leaves_out_keys_beyond_a_block],
)
def test_a_kernel_that_is_wrong_in_the_output_or_the_log_sum_exp_or_raises_is_not(kernel, case):
    assert not is_trusted(kernel, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [_no_number_where_all_is_hidden, _ignores_the_mask])
def test_a_kernel_that_is_wrong_under_a_mask_is_used_without_one_only(kernel, dtype):
    assert not is_trusted(kernel, KernelCase(CPU, dtype, 64, 64, True))
    assert is_trusted(kernel, KernelCase(CPU, dtype, 64, 64, False))


def test_float32_at_the_precision_of_tf32_is_refused():
    assert not is_trusted(_as_tf32, KernelCase(CPU, torch.float32, 64, 64, False))


def test_a_trial_is_remembered_for_its_case_and_can_be_taken_back():
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return _agrees(*arguments)

    case, other = CASES[0], CASES[1]
    assert is_trusted(counted, case)
    tried = len(calls)
    assert is_trusted(counted, case)
    assert len(calls) == tried
    assert is_trusted(counted, other)
    assert len(calls) > tried
    distrust(counted, case, "it failed later")
    tried = len(calls)
    assert not is_trusted(counted, case)
    assert is_trusted(counted, other)
    assert len(calls) == tried


def test_threads_that_meet_a_kernel_at_once_try_it_once():
    trials, found = [], []

    def slow(*arguments):
        trials.append(threading.get_ident())
        time.sleep(0.01)
        return _agrees(*arguments)

    threads = [threading.Thread(target=lambda: found.append(is_trusted(slow, CASES[1]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert len(set(trials)) == 1


def test_a_trial_leaves_random_numbers_and_gradient_mode_as_they_were():
    state = torch.get_rng_state()
    modes = []

    def noting(*arguments):
        modes.append(torch.is_grad_enabled())
        return _agrees(*arguments)

    assert is_trusted(noting, CASES[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(modes)
    assert torch.is_grad_enabled()


def test_nothing_is_tried_while_a_graph_is_captured_but_what_was_tried_is_known(monkeypatch):
    def untouchable(*arguments):
        raise AssertionError("run during capture")

    case = KernelCase(torch.device("cuda", 0), torch.float32, 64, 64, False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_trusted(untouchable, case)
    assert not kernel_trial._trusted
    kernel_trial._trusted[untouchable, case] = True
    assert is_trusted(untouchable, case)


def test_a_full_device_is_no_verdict_on_a_kernel():
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        is_trusted(full, CASES[0])
    assert not kernel_trial._trusted


def test_why_a_kernel_is_not_used_is_logged(caplog):
    caplog.set_level("INFO", logger=kernel_trial.__name__)
    assert not is_trusted(_raises, CASES[0])
    assert "_raises is not used" in caplog.text
    assert "no kernel image is available" in caplog.text
