"""`PrefixQuantizedCache` on models: the contract of prefix caches, lossiness that is stated, and memory."""

import copy

import pytest
import torch
from quantized_oracles import FORMATS, name_of, new_cache, run
from transformers.cache_utils import QuantizedCache

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import (
    BatchSizeError,
    InputMismatchError,
    LossyPrefixError,
    NotCroppableError,
    UnsupportedLayerError,
    UnsupportedModelError,
)
from recurrent_models import RECURRENT_MODELS
from tiny_models import COMMON, TINY_MODELS, build

MODELS = ("llama", "mistral", "gemma3_text", "gpt2")
LENGTH = 150


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=FORMATS, ids=name_of)
def form(request):
    return {**request.param, "residual_length": 8}


@pytest.fixture(params=MODELS)
def model(request):
    return TINY_MODELS[request.param]()


def ids(rows, tokens):
    return torch.randint(1, COMMON["vocab_size"], (rows, tokens))


def filled(model, text, **options):
    cache = new_cache(model, **options)
    run(model, text, cache)
    return cache


def wide_mistral(window=100):
    config = TINY_MODELS["mistral"]().config
    config.sliding_window = window
    return build(config)


def test_it_is_a_quantized_cache_of_transformers():
    cache = new_cache(TINY_MODELS["gemma3_text"]())
    assert isinstance(cache, QuantizedCache)
    assert not cache.is_compileable
    assert cache.is_croppable


def test_the_call_that_adds_tokens_attends_to_them_exactly(model, form):
    text = ids(2, LENGTH)
    expected = model(input_ids=text).logits
    torch.testing.assert_close(run(model, text, new_cache(model, **form)), expected, atol=1e-4, rtol=0)


def test_8_bits_stay_close_to_the_exact_model(model):
    text = ids(1, LENGTH)
    cache = filled(model, text[:, :120], nbits=8, residual_length=8)
    expected = model(input_ids=text).logits[:, 120:].log_softmax(-1)
    difference = run(model, text[:, 120:], cache).log_softmax(-1) - expected
    assert 0 <= float((difference**2).mean().sqrt()) < 0.1


@pytest.mark.parametrize("length", [1, 30, 77, 119])
def test_fork_crop_restore_and_rows_continue_as_a_cache_that_never_held_more(model, form, length):
    text, more = ids(1, 120), ids(3, 50)
    cache = filled(model, text, **form)
    snapshot = cache.snapshot()
    if not cache.can_crop_to(length):
        with pytest.raises(NotCroppableError):
            cache.crop_to(length)
        length = 119
    cache.crop_to(length)
    expected = [run(model, row[None], cache.fork()) for row in more]
    batch = cache.fork(batch_size=3)
    torch.testing.assert_close(run(model, more, batch), torch.cat(expected), atol=1e-4, rtol=0)
    repeated = cache.fork()
    repeated.batch_repeat_interleave(3)
    torch.testing.assert_close(run(model, more, repeated), torch.cat(expected), atol=1e-4, rtol=0)
    other = snapshot.crop_to(length).to_cache()
    assert torch.equal(run(model, more[:1], other), expected[0])
    cache.restore(snapshot)
    assert torch.equal(run(model, more[:1], cache), run(model, more[:1], snapshot.to_cache()))


def test_a_deepcopy_is_a_fork_and_reset_starts_anew(model, form):
    text = ids(1, LENGTH)
    cache = filled(model, text, **form)
    copied = copy.deepcopy(cache)
    more = ids(1, 40)
    assert torch.equal(run(model, more, cache), run(model, more, copied))
    cache.reset()
    assert cache.seq_length == 0
    assert torch.equal(run(model, text, cache), run(model, text, new_cache(model, **form)))


def test_forks_and_snapshots_share_groups_so_that_storage_holds_the_prefix_once():
    model = TINY_MODELS["llama"]()
    cache = filled(model, ids(1, 250), residual_length=0, exact_first=0)
    shares = [cache.snapshot(), cache.fork(), cache.fork(batch_size=16)]
    assert hpc.total_nbytes([cache, *shares]) == cache.nbytes
    run(model, ids(16, 3), shares[2])
    own = hpc.total_nbytes([cache, *shares]) - cache.nbytes
    assert own < 16 * 32 * 2 * 2 * 2 * 8 * 4 * 1.1  # at most the residual of each row, in two layers


def test_bytes_are_those_of_codes_scales_and_exact_tokens():
    model = TINY_MODELS["llama"]()  # 2 layers, 2 heads of size 8
    values = 2 * 2 * 2 * 8
    for options, bits in (({"nbits": 8}, 8.25), ({"nbits": 4}, (4 + 16 / 64 + 4 + 2 * 16 / 32) / 2)):
        cache = filled(model, ids(1, 4 + 224), exact_first=4, residual_length=0, **options)
        assert cache.nbytes == 4 * values * 4 + 224 * values * bits / 8
        report = cache.report()
        assert report.bits_per_value == bits
        assert report.bytes_per_token == cache.nbytes / 228
        assert report.tokens == 228


def test_snapshots_say_that_they_are_lossy_and_by_how_much(model, form):
    text = ids(1, LENGTH)
    cache = filled(model, text, **form)
    snapshot = cache.snapshot()
    exact = hpc.PrefixDynamicCache(config=model.config)
    run(model, text, exact)
    assert snapshot.is_lossy
    assert exact.snapshot().error is None
    for index, (layer, precise) in enumerate(zip(cache.layers, exact.layers, strict=True)):
        is_quantized = bool(layer.state().runs)
        assert is_quantized == (layer.window is None)
        for side, (now, was) in enumerate(((layer.keys, precise.keys), (layer.values, precise.values))):
            measured = (snapshot.error.keys, snapshot.error.values)[side][index]
            quantized = slice(4, None)
            norm = was[:, :, quantized].norm()
            # The tail is exact, so what is measured on quantized tokens alone is somewhat larger.
            true = float((now - was)[:, :, quantized].norm() / norm)
            assert true <= measured <= 1.5 * true + 1e-6
            assert (measured > 0) == is_quantized


def test_lossy_prefixes_go_to_other_strategies_only_when_asked_for_and_stay_lossy():
    model = TINY_MODELS["llama"]()
    snapshot = filled(model, ids(1, LENGTH), nbits=8).snapshot()
    more = ids(1, 20)
    expected = run(model, more, snapshot.to_cache())
    for strategy, options in (
        ("prefix-dynamic", {}),
        ("prefix-static", {"max_cache_len": 200}),
        ("prefix-offloaded", {}),
    ):
        with pytest.raises(LossyPrefixError, match="allow_lossy=True"):
            snapshot.to_cache(strategy, **options)
        cache = snapshot.to_cache(strategy, allow_lossy=True, **options)
        assert cache.is_lossy
        assert cache.fork().snapshot().is_lossy
        torch.testing.assert_close(run(model, more, cache), expected, atol=1e-4, rtol=0)
        cache.reset()
        assert not cache.is_lossy
    exact = hpc.PrefixDynamicCache(config=model.config)
    with pytest.raises(LossyPrefixError, match="to_cache"):
        exact.restore(snapshot)
    assert exact.seq_length == 0


@pytest.mark.parametrize("source", ["prefix-dynamic", "prefix-static", "prefix-offloaded"])
def test_an_exact_prefix_is_quantized_once_when_it_is_loaded(model, form, source):
    text, more = ids(1, LENGTH), ids(2, 40)
    options = {"max_cache_len": 200} if source == "prefix-static" else {}
    classes = {
        "prefix-dynamic": hpc.PrefixDynamicCache,
        "prefix-static": hpc.PrefixStaticCache,
        "prefix-offloaded": hpc.PrefixOffloadedCache,
    }
    exact = classes[source](config=model.config, **options)
    run(model, text, exact)
    cache = exact.snapshot().to_cache("prefix-quantized", batch_size=2, **form)
    same = filled(model, text, **form).fork(2)
    assert torch.equal(run(model, more, cache), run(model, more, same))


def test_a_snapshot_is_continued_with_the_options_that_it_was_quantized_with():
    model = TINY_MODELS["llama"]()
    snapshot = filled(model, ids(1, LENGTH), nbits=8, residual_length=8).snapshot()
    assert snapshot.to_cache().report().scheme == snapshot.to_cache(nbits=8).report().scheme
    with pytest.raises(InputMismatchError, match="options of the one that filled the prefix"):
        snapshot.to_cache(nbits=4)
    cache = new_cache(model)
    run(model, ids(1, 5), cache)
    with pytest.raises(InputMismatchError, match="options"):
        cache.restore(snapshot)
    assert cache.seq_length == 5


def test_own_tokens_stay_exact_if_only_the_prefix_is_to_be_quantized():
    model = TINY_MODELS["llama"]()
    text, more = ids(1, LENGTH), ids(2, 90)
    exact = hpc.PrefixDynamicCache(config=model.config)
    run(model, text, exact)
    cache = exact.snapshot().to_cache("prefix-quantized", batch_size=2, quantize_own=False, residual_length=0)
    before = cache.layers[0].state().runs[0].tokens
    run(model, more, cache)
    assert sum(part.tokens for part in cache.layers[0].state().runs) == before
    forked = cache.fork()
    restored = cache.snapshot().to_cache(batch_size=2, quantize_own=False)
    for other in (forked, restored):
        assert torch.equal(other.layers[1].keys, cache.layers[1].keys)
        run(model, ids(2, 3), other)


def test_windows_wider_than_the_residual_are_quantized_and_give_back_what_they_leave():
    model = wide_mistral()
    cache = filled(model, ids(1, 180), residual_length=8)
    sizes = []
    for _ in range(60):
        run(model, ids(1, 1), cache)
        state = cache.layers[0].state()
        assert state.runs
        assert sum(segment.tokens for segment in state.segments) == 100
        sizes.append(cache.nbytes)
    exact = hpc.PrefixDynamicCache(config=model.config)
    run(model, ids(1, 240), exact)
    assert max(sizes) < 0.6 * exact.nbytes


def test_windows_are_taken_back_after_recording():
    model = wide_mistral()
    cache = filled(model, ids(1, 180), residual_length=8, nbits=8)
    cache.activate_past_recording()
    other = cache.fork()
    text = ids(1, 60)
    run(model, text, cache)
    cache.crop_to(200)
    run(model, text[:, :20], other)
    assert cache.can_crop_to(200)
    # Not bit-equal: what was taken back had completed groups, which stay quantized.
    more = ids(1, 30)
    difference = run(model, more, cache).log_softmax(-1) - run(model, more, other).log_softmax(-1)
    assert float((difference**2).mean().sqrt()) < 0.05


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "jamba"])
def test_the_attention_half_of_hybrids_is_quantized_and_running_states_stay_exact(name):
    model = RECURRENT_MODELS[name]()
    text, more = ids(1, LENGTH), ids(2, 1)
    cache = filled(model, text, residual_length=8, nbits=8)
    assert cache.report().bits_per_value == 8.25
    exact = hpc.PrefixDynamicCache(config=model.config)
    run(model, text, exact)
    batch = cache.fork(2)
    difference = run(model, more, batch).log_softmax(-1) - run(model, more, exact.fork(2)).log_softmax(-1)
    assert float(difference.abs().max()) < 0.2
    assert torch.equal(run(model, more[:1], cache.snapshot().to_cache()), run(model, more[:1], cache.fork()))


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_rows_of_hybrids_continue_as_forks_that_run_alone_in_every_format(name, form):
    model = RECURRENT_MODELS[name]()
    text, more = ids(1, LENGTH), ids(3, 2)
    cache = filled(model, text, **form)
    assert cache.report().bits_per_value > 0
    snapshot = cache.snapshot()
    alone = [cache.fork() for _ in more]
    first = torch.cat([run(model, row[None, :1], fork) for row, fork in zip(more, alone, strict=True)])
    second = torch.cat([run(model, row[None, 1:], fork) for row, fork in zip(more, alone, strict=True)])
    for batch in (cache.fork(3), snapshot.to_cache(batch_size=3), cache.fork()):
        if batch.rows == 1:
            batch.batch_repeat_interleave(3)
        torch.testing.assert_close(run(model, more[:, :1], batch), first, atol=1e-4, rtol=0)
        batch.reorder_cache(torch.tensor([2, 0, 1]))
        batch.batch_select_indices(torch.tensor([0, 2]))
        torch.testing.assert_close(run(model, more[[2, 1], 1:], batch), second[[2, 1]], atol=1e-4, rtol=0)
    assert not cache.can_crop_to(LENGTH - 5)
    run(model, more[:1, :1], cache)
    cache.restore(snapshot)
    assert torch.equal(run(model, more[:1, :1], cache), first[:1])


def test_padded_rows_are_served_as_by_other_caches(form):
    model = TINY_MODELS["llama"]()
    text = ids(1, LENGTH)
    cache = filled(model, text, **form)
    suffixes, mask = ids(2, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    batch = cache.fork(2)
    logits = run(model, cache=batch, **batch.prepare_inputs(suffixes, mask)._asdict())
    for row, padding in enumerate((0, 2)):
        alone = run(model, suffixes[row : row + 1, padding:], cache.fork())
        torch.testing.assert_close(logits[row : row + 1, padding:], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_dtype(dtype):
    model = TINY_MODELS["llama"]().to(dtype)
    text = ids(1, LENGTH)
    cache = filled(model, text)
    assert cache.layers[0].keys.dtype == dtype
    exact = hpc.PrefixDynamicCache(config=model.config)
    run(model, text, exact)
    assert cache.nbytes < 0.8 * exact.nbytes
    assert run(model, ids(1, 3), cache).dtype == dtype


def test_gradients_are_those_of_exact_tokens_behind_a_constant_prefix():
    model = TINY_MODELS["llama"]()
    prefix, suffix = ids(1, LENGTH), ids(1, 60)
    cache = filled(model, prefix, nbits=8, residual_length=8)
    with torch.enable_grad():
        dynamic = cache.snapshot().to_cache("prefix-dynamic", allow_lossy=True)
        parameters = list(model.parameters())
        for first, second in (suffix.split(30, dim=1), (suffix[:, :59], suffix[:, 59:])):
            sums = []
            for holder in (cache.fork(), dynamic.fork()):
                run(model, first, holder)
                loss = run(model, second, holder).log_softmax(-1)[..., 0].sum()
                sums.append(torch.autograd.grad(loss, parameters, allow_unused=True))
            for ours, theirs in zip(*sums, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_inference_mode_and_later_use_outside_of_it_go_together():
    model = TINY_MODELS["llama"]()
    with torch.inference_mode():
        cache = filled(model, ids(1, LENGTH), residual_length=8)
    snapshot = cache.snapshot()
    for _ in range(40):
        run(model, ids(1, 1), cache)
    with torch.enable_grad():
        assert run(model, ids(1, 3), snapshot.to_cache()).requires_grad


def test_bad_input_changes_nothing():
    model = TINY_MODELS["llama"]()
    cache = filled(model, ids(2, LENGTH))
    before = cache.layers[0].keys
    with pytest.raises(BatchSizeError):
        run(model, ids(3, 2), cache)
    with pytest.raises(BatchSizeError):
        cache.fork(3)
    with pytest.raises(NotCroppableError):
        cache.crop_to(LENGTH + 1)
    with pytest.raises(InputMismatchError):
        cache.snapshot(input_ids=ids(2, 3))
    assert cache.seq_length == LENGTH
    assert torch.equal(cache.layers[0].keys, before)


def test_what_cannot_be_quantized_is_refused_by_name():
    double = TINY_MODELS["llama"]().double()
    with pytest.raises(UnsupportedModelError, match="float64"):
        run(double, ids(1, 3), new_cache(double))
    from transformers import AutoConfig

    with pytest.raises(UnsupportedLayerError, match="PrefixQuantizedCache"):
        hpc.PrefixQuantizedCache(config=AutoConfig.for_model("glm_moe_dsa"))
