"""`PrefixOffloadedCache` is exact, shared, and asks for no more of a device than two layers."""

import copy

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument
from hf_prefix_cache.exceptions import BatchSizeError, NotCroppableError, UnsupportedLayerError
from hf_prefix_cache.layers import fetch
from hf_prefix_cache.layers.offloaded import OffloadedState, PrefixOffloadedLayer
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

LENGTH, SPLIT = 24, 13


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=[False, True], ids=["host_computes", "device_apart"])
def is_apart(request, monkeypatch):
    """With True, layers treat the host as a device apart, and fetch what they hold: the host stands for the device."""
    if request.param:
        monkeypatch.setattr(PrefixOffloadedLayer, "is_apart", True)
        monkeypatch.setattr(fetch, "_moved", lambda segment, device: type(segment)(*map(torch.clone, segment)))
    return request.param


@pytest.fixture(params=TINY_MODELS)
def model(request):
    return TINY_MODELS[request.param]()


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def run(model, input_ids, cache):
    return model(input_ids=input_ids, **cache_argument(cache)).logits


def filled(model, text):
    cache = hpc.PrefixOffloadedCache(config=model.config)
    run(model, text, cache)
    return cache


def assert_exact(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_snapshot_fork_crop_and_restore_equal_the_uncached_forward(model, is_apart):
    text, more = ids(1, LENGTH), ids(3, 4)
    cache = filled(model, text[:, :SPLIT])
    snapshot = cache.snapshot()
    whole = torch.cat([text[:, :SPLIT].expand(3, -1), more], dim=1)
    expected = model(input_ids=whole).logits[:, SPLIT:]
    for tokens in (1, 4):
        batch = cache.fork(batch_size=3)
        assert_exact(run(model, more[:, :tokens], batch), expected[:, :tokens])
        assert_exact(run(model, more[:1, :tokens], cache), expected[:1, :tokens])
        cache.restore(snapshot)
    run(model, ids(1, 1), cache)
    cache.crop(-1)
    batch = copy.deepcopy(cache)
    batch.batch_repeat_interleave(3)
    assert_exact(run(model, more, batch), expected)
    batch.reorder_cache(torch.tensor([2, 0, 0]))
    last = model(input_ids=torch.cat([whole[[2, 0, 0]], more[:, :1]], dim=1)).logits[:, -1:]
    assert_exact(run(model, more[:, :1], batch), last)
    cache.reset()
    assert_exact(run(model, text, cache), model(input_ids=text).logits)


@pytest.mark.parametrize(
    "name", ["falcon_h1", "qwen3_next", "lfm2", *(["mamba2"] if CACHE_ARGUMENT == "cache" else [])]
)
def test_running_states_stay_resident_beside_offloaded_attention(name, is_apart):
    model = RECURRENT_MODELS[name]()
    text = ids(1, LENGTH)
    cache = filled(model, text[:, :SPLIT])
    snapshot = cache.snapshot()
    expected = model(input_ids=text).logits[:, SPLIT:]
    assert_exact(run(model, text[:, SPLIT:], cache), expected)
    assert_exact(
        run(model, text[:, SPLIT:].expand(2, -1), snapshot.to_cache(batch_size=2)), expected.expand(2, -1, -1)
    )


def test_forks_share_host_memory(is_apart):
    model = TINY_MODELS["llama"]()
    cache = filled(model, ids(1, 100))
    forks = [cache.fork(), cache.fork(batch_size=16), cache.snapshot().to_cache(batch_size=4)]
    assert hpc.total_nbytes([cache, *forks]) == cache.nbytes
    forks[0].unshare()
    run(model, ids(1, 1), forks[0])
    assert hpc.total_nbytes([cache, *forks]) < 1.1 * cache.nbytes


def test_it_computes_what_a_dynamic_cache_computes_bit_for_bit(model):
    text = ids(2, LENGTH)
    ours, theirs = filled(model, text[:, :SPLIT]), hpc.PrefixDynamicCache(config=model.config)
    run(model, text[:, :SPLIT], theirs)
    assert torch.equal(run(model, text[:, SPLIT:], ours), run(model, text[:, SPLIT:], theirs))


def test_windows_are_resident_and_full_attention_is_offloaded():
    cache = filled(TINY_MODELS["gemma3_text"](), ids(1, LENGTH))
    sliding, full = cache.layers
    assert not isinstance(sliding, PrefixOffloadedLayer)
    assert isinstance(full.state(), OffloadedState)
    assert all(tensor.device.type == "cpu" for tensor in full.tensors())


def test_layers_are_fetched_one_ahead_of_use(monkeypatch, is_apart):
    if not is_apart:
        pytest.skip("nothing is fetched where the host computes")
    model = TINY_MODELS["llama"]()
    cache = filled(model, ids(1, SPLIT))
    events = []
    fetch, update = PrefixOffloadedLayer.fetch, PrefixOffloadedLayer.update

    def spy_fetch(self, stream):
        if self._fetch is None and self._length:
            events.append(("fetch", cache.layers.index(self)))
        fetch(self, stream)

    def spy_update(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        events.append(("update", cache.layers.index(self)))
        return result

    monkeypatch.setattr(PrefixOffloadedLayer, "fetch", spy_fetch)
    monkeypatch.setattr(PrefixOffloadedLayer, "update", spy_update)
    run(model, ids(1, 1), cache)
    assert events == [("fetch", 0), ("update", 0), ("fetch", 1), ("update", 1)]
    assert all(layer._fetch is None for layer in cache.layers)


def test_what_was_fetched_before_rows_changed_places_is_not_used(is_apart):
    model = TINY_MODELS["llama"]()
    texts = ids(2, LENGTH)
    cache = filled(model, texts[:, :SPLIT])
    for layer in cache.layers:
        layer.fetch(None)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_exact(run(model, texts.flip(0)[:, SPLIT:], cache), model(input_ids=texts.flip(0)).logits[:, SPLIT:])


@pytest.mark.parametrize("change", ["crop", "repeat", "restore", "reset"])
def test_what_was_fetched_for_a_forward_that_failed_is_not_used(change, is_apart):
    model = TINY_MODELS["llama"]()
    text = ids(1, LENGTH)
    cache = filled(model, text[:, :SPLIT])
    other = filled(model, ids(1, SPLIT)).snapshot()
    for layer in cache.layers:
        layer.fetch(None)
    if change == "crop":
        cache.crop(-3)
        assert_exact(run(model, text[:, SPLIT - 3 :], cache), model(input_ids=text).logits[:, SPLIT - 3 :])
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        expected = model(input_ids=text).logits[:, SPLIT:].expand(2, -1, -1)
        assert_exact(run(model, text[:, SPLIT:].expand(2, -1), cache), expected)
    elif change == "restore":
        expected = run(model, text[:, SPLIT:], other.to_cache())
        cache.restore(other)
        assert_exact(run(model, text[:, SPLIT:], cache), expected)
    else:
        cache.reset()
        assert_exact(run(model, text, cache), model(input_ids=text).logits)


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-quantized"])
def test_prefixes_go_from_and_to_other_strategies(strategy):
    model = TINY_MODELS["gemma3_text"]()
    text = ids(1, LENGTH)
    expected = model(input_ids=text).logits[:, SPLIT:]
    options = {"max_cache_len": 40} if strategy == "prefix-static" else {}
    if strategy == "prefix-quantized":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    snapshot = filled(model, text[:, :SPLIT]).snapshot()
    there = snapshot.to_cache(strategy, **options)
    assert_exact(run(model, text[:, SPLIT:], there), expected)
    if strategy != "prefix-quantized":
        there = snapshot.to_cache(strategy, **options)
        back = there.snapshot().to_cache("prefix-offloaded")
        assert_exact(run(model, text[:, SPLIT:], back), expected)
    assert not snapshot.is_lossy


def test_snapshots_for_another_device_stay_in_host_memory():
    model = TINY_MODELS["llama"]()
    moved = filled(model, ids(1, SPLIT)).snapshot().to("meta")
    state = moved.layers[0]
    assert state.home.type == "meta"
    assert all(tensor.device.type == "cpu" for tensor in state.tensors())


def test_gradients_are_those_of_the_uncached_forward(is_apart):
    model = TINY_MODELS["llama"]()
    text = ids(1, LENGTH)
    parameters = list(model.parameters())
    with torch.enable_grad():
        cache = hpc.PrefixOffloadedCache(config=model.config)
        run(model, text[:, :SPLIT], cache)
        ours = torch.autograd.grad(run(model, text[:, SPLIT:], cache).square().mean(), parameters)
        theirs = torch.autograd.grad(model(input_ids=text).logits[:, SPLIT:].square().mean(), parameters)
    for now, then in zip(ours, theirs, strict=True):
        torch.testing.assert_close(now, then, atol=1e-3, rtol=1e-3)


def test_bad_input_changes_nothing(is_apart):
    model = TINY_MODELS["llama"]()
    cache = filled(model, ids(2, SPLIT))
    before = cache.layers[1].keys.clone()
    with pytest.raises(BatchSizeError):
        run(model, ids(3, 1), cache)
    with pytest.raises(NotCroppableError):
        cache.crop_to(SPLIT + 1)
    assert torch.equal(cache.layers[1].keys, before)
    assert cache.seq_length == SPLIT


def test_layers_of_another_kind_are_refused_by_name(monkeypatch):
    from transformers import AutoConfig

    from hf_prefix_cache.layers import DYNAMIC_KINDS

    monkeypatch.delitem(DYNAMIC_KINDS, "indexed_attention", raising=False)
    with pytest.raises(UnsupportedLayerError, match="PrefixOffloadedCache"):
        hpc.PrefixOffloadedCache(config=AutoConfig.for_model("glm_moe_dsa"))
