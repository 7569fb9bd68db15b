"""Files that keys and values are offloaded to: exact, shared, given back, and what happens where there is no room."""

import errno
import gc
import importlib.util
import os
import resource
import shutil

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.exceptions import OffloadError
from hf_prefix_cache.layers import fetch, tiers
from hf_prefix_cache.layers.offloaded import PrefixOffloadedLayer
from hf_prefix_cache.layers.quantized import PrefixQuantizedLayer
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

LENGTH = 200
QUANTIZED = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
MODELS = {
    **{name: TINY_MODELS[name] for name in ("llama", "gemma3_text", "gpt2")},
    "falcon_h1": RECURRENT_MODELS["falcon_h1"],
}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def llama():
    return TINY_MODELS["llama"]()


@pytest.fixture(params=[False, True], ids=["host_computes", "device_apart"])
def is_apart(request, monkeypatch):
    """With True, layers treat the host as a device apart, and a thread fetches: the host stands for the device."""
    if request.param:
        monkeypatch.setattr(PrefixOffloadedLayer, "is_apart", True)
        monkeypatch.setattr(PrefixQuantizedLayer, "is_apart", property(lambda layer: layer._tier is not None))
        monkeypatch.setattr(fetch, "_moved", _copied)
    return request.param


def _copied(segment, device):
    copies = [part.clone() for part in segment]
    return segment.kept(copies) if hasattr(segment, "kept") else type(segment)(*copies)


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def run(model, input_ids, cache):
    return model(input_ids=input_ids, **cache_argument(cache)).logits


def filled(model, text, folder, **options):
    kind = hpc.PrefixQuantizedCache if options else hpc.PrefixOffloadedCache
    cache = kind(config=model.config, offload_folder=folder, **options)
    run(model, text, cache)
    return cache


def in_files(held):
    return [part for part in held.tensors if tiers._mapping_of(part) is not None]


def assert_exact(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_prefixes_in_files_are_continued_exactly_after_every_operation(model, is_apart, tmp_path):
    text, more = ids(1, LENGTH), ids(3, 4)
    cache = filled(model, text, tmp_path)
    assert in_files(cache)
    snapshot = cache.snapshot()
    whole = torch.cat([text.expand(3, -1), more], dim=1)
    expected = model(input_ids=whole).logits[:, LENGTH:]
    for start in (
        cache.fork(3),
        snapshot.to_cache(batch_size=3, offload_folder=tmp_path),
        snapshot.to_cache(batch_size=3),
    ):
        assert_exact(run(model, more[:, :1], start), expected[:, :1])
    cache.restore(snapshot)
    run(model, ids(1, 1), cache)
    if cache.can_crop_to(LENGTH):
        cache.crop_to(LENGTH)
    else:
        cache.restore(snapshot)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert_exact(run(model, more[:, :1], cache), expected[:, :1])
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.rows == 1
    cache.reset()
    assert_exact(run(model, text, cache), model(input_ids=text).logits)


@pytest.mark.parametrize("length", [1, 63, 64, 120, 199])
def test_crop_at_any_token_keeps_what_is_in_files(llama, length, is_apart, tmp_path):
    text, more = ids(1, LENGTH), ids(1, 3)
    cache = hpc.PrefixOffloadedCache(config=llama.config, offload_folder=tmp_path)
    for chunk in text.split(70, dim=1):
        run(llama, chunk, cache)
    snapshot = cache.snapshot()
    cache.crop_to(length)
    expected = llama(input_ids=torch.cat([text[:, :length], more], dim=1)).logits[:, length:]
    assert_exact(run(llama, more, cache), expected)
    assert_exact(run(llama, more, snapshot.crop_to(length).to_cache()), expected)


def test_own_tokens_move_to_files_when_there_are_enough_and_the_last_ones_stay_in_memory(llama, tmp_path):
    text = ids(1, LENGTH)
    cache = hpc.PrefixOffloadedCache(config=llama.config, offload_folder=tmp_path)
    expected = llama(input_ids=text).logits
    in_memory = []
    for place in range(LENGTH):
        assert_exact(run(llama, text[:, place : place + 1], cache), expected[:, place : place + 1])
        in_memory.append(cache.seq_length - sum(part.shape[2] for part in in_files(cache)) // 4)
    assert max(in_memory) < 64
    assert in_memory[-1] == LENGTH % 64


def test_a_layers_tokens_are_in_memory_only_while_it_runs(llama, tmp_path):
    cache = filled(llama, ids(1, LENGTH), tmp_path)
    released, prefetched = [], []
    advise = tiers._advise

    def spy(tensors, advice):
        tensors = list(tensors)
        (released if advice == "MADV_DONTNEED" else prefetched).extend(part.data_ptr() for part in tensors)
        advise(tensors, advice)

    tiers._advise = spy
    try:
        run(llama, ids(1, 1), cache)
    finally:
        tiers._advise = advise
    places = {part.data_ptr() for part in in_files(cache)}
    assert places <= set(released)
    assert prefetched
    assert set(prefetched) < places  # the first layer's is not asked for ahead


def test_forks_and_snapshots_share_files_whose_room_is_free_when_the_last_is_gone(llama, tmp_path):
    cache = filled(llama, ids(1, LENGTH), tmp_path)
    shares = [cache.snapshot(), cache.fork(), cache.fork(batch_size=16)]
    assert hpc.total_nbytes([cache, *shares]) == cache.nbytes
    assert not list(tmp_path.iterdir())  # files have no name
    gc.collect()
    count = len(tiers._mappings)
    del cache, shares[1:]
    gc.collect()
    assert len(tiers._mappings) == count
    del shares
    gc.collect()
    assert len(tiers._mappings) == count - 4


def test_a_vanished_folder_harms_nothing_that_is_held(llama, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    text, more = ids(1, LENGTH), ids(1, 70)
    cache = filled(llama, text, folder)
    snapshot = cache.snapshot()
    shutil.rmtree(folder)
    expected = llama(input_ids=torch.cat([text, more], dim=1)).logits[:, LENGTH:]
    with pytest.raises(OffloadError, match=r"gone.*No such file or directory; make room there"):
        run(llama, more, cache)
    assert cache.seq_length == LENGTH
    assert_exact(run(llama, more[:, :3], cache), expected[:, :3])  # few tokens need no file
    assert_exact(run(llama, more, snapshot.to_cache(offload_folder=None)), expected)
    with pytest.raises(OffloadError, match="gone"):
        hpc.PrefixOffloadedCache(config=llama.config, offload_folder=folder)
    folder.mkdir()
    cache.crop_to(LENGTH)
    assert_exact(run(llama, more, cache), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"nbits": 8, "residual_length": 8}, marks=QUANTIZED)], ids=["exact", "quantized"]
)
def test_a_full_disk_stops_a_forward_before_anything_is_changed(name, options, tmp_path):
    model = MODELS[name]()
    text, more = ids(1, 100), ids(1, 90)
    cache = filled(model, text, tmp_path, **options)
    expected = run(model, more, cache.fork())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OffloadError, match="did not take"):
            run(model, more, cache)
        with pytest.raises(OffloadError, match="did not take"):
            filled(model, text, tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert all(layer.seen() == 100 for layer in cache.layers)
    assert torch.equal(run(model, more, cache), expected)


@pytest.mark.parametrize("options", [{}, pytest.param({"nbits": 8}, marks=QUANTIZED)], ids=["exact", "quantized"])
def test_a_restore_that_does_not_fit_leaves_the_cache_as_it_was(llama, options, tmp_path):
    text, more = ids(1, 30), ids(1, 3)
    snapshot = hpc.PrefixCachedModel(llama).prefill(ids(1, LENGTH))
    cache = filled(llama, text, tmp_path, **options)
    expected = run(llama, more, cache.fork())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OffloadError, match="did not take"):
            cache.load(snapshot, batch_size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert cache.seq_length == 30
    assert torch.equal(run(llama, more, cache), expected)


@pytest.mark.parametrize(
    "kind",
    [hpc.PrefixOffloadedCache, pytest.param(hpc.PrefixQuantizedCache, marks=QUANTIZED)],
    ids=lambda kind: kind.strategy,
)
def test_a_read_only_folder_is_refused_when_the_cache_is_made(llama, kind, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tiers.tempfile, "TemporaryFile", refuse)
    with pytest.raises(OffloadError, match="Read-only file system"):
        kind(config=llama.config, offload_folder=tmp_path)


@QUANTIZED
@pytest.mark.parametrize("where", [{"offloading": True}, {"offload_folder": True}], ids=["host", "files"])
@pytest.mark.parametrize("name", MODELS)
def test_an_offloaded_quantized_prefix_is_what_a_resident_one_is_bit_for_bit(name, where, is_apart, tmp_path):
    model = MODELS[name]()
    where = {"offload_folder": tmp_path} if "offload_folder" in where else where
    text, more = ids(1, LENGTH), ids(3, 40)
    resident = hpc.PrefixQuantizedCache(config=model.config, residual_length=8)
    run(model, text, resident)
    cache = hpc.PrefixQuantizedCache(config=model.config, residual_length=8, **where)
    run(model, text, cache)
    assert bool(in_files(cache)) == ("offload_folder" in where)
    expected = run(model, more[:, :1], resident.fork(3))
    snapshot = cache.snapshot()
    starts = [
        cache.fork(3),
        snapshot.to_cache(batch_size=3, **where),
        resident.snapshot().to_cache(batch_size=3, **where),
    ]
    for start in starts:
        assert torch.equal(run(model, more[:, :1], start), expected)
    exact = snapshot.to_cache("prefix-dynamic", allow_lossy=True)
    assert torch.equal(exact.layers[-1].keys, resident.layers[-1].keys)
    for place in range(40):
        now = run(model, more[:1, place : place + 1], cache)
        assert torch.equal(now, run(model, more[:1, place : place + 1], resident))
    if cache.can_crop_to(150):
        cache.crop_to(150)
        resident.crop_to(150)
        assert torch.equal(run(model, more[:1], cache), run(model, more[:1], resident))


@pytest.mark.parametrize("strategy", ["prefix-offloaded", pytest.param("prefix-quantized", marks=QUANTIZED)])
def test_generate_offloads_to_a_folder_named_in_its_settings(llama, strategy, tmp_path):
    prompt = ids(1, 150)
    settings = {"offload_folder": str(tmp_path)}
    if strategy == "prefix-quantized":
        settings |= {"nbits": 8, "residual_length": 8}
    expected = llama.generate(prompt, max_new_tokens=5, do_sample=False)
    for _ in range(2):
        found = llama.generate(
            prompt,
            max_new_tokens=5,
            do_sample=False,
            cache_implementation=strategy,
            cache_config=settings,
            return_dict_in_generate=True,
        )
        assert torch.equal(found.sequences, expected)
        assert in_files(found["cache" if "cache" in found else "past_key_values"])
    assert hpc.last_report(llama).reused_tokens == 149


def test_gradients_are_those_of_the_uncached_forward(llama, tmp_path):
    text = ids(1, 150)
    parameters = list(llama.parameters())
    with torch.enable_grad():
        cache = hpc.PrefixOffloadedCache(config=llama.config, offload_folder=tmp_path)
        run(llama, text[:, :100], cache)
        ours = torch.autograd.grad(run(llama, text[:, 100:], cache).square().mean(), parameters)
        theirs = torch.autograd.grad(llama(input_ids=text).logits[:, 100:].square().mean(), parameters)
    for now, then in zip(ours, theirs, strict=True):
        torch.testing.assert_close(now, then, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_hold_every_dtype_bit_for_bit(dtype, tmp_path):
    files = tiers.MappedFiles(tmp_path)
    tensors = [
        torch.randn(2, 3, 70, 8).to(dtype).transpose(1, 2),
        torch.arange(5),
        torch.zeros(1, 7, dtype=torch.uint8),
    ]
    with torch.inference_mode():
        kept = files.keep(tensors)
    files.settle()
    assert all(torch.equal(now, was) and now.dtype == was.dtype for now, was in zip(kept, tensors, strict=True))
    assert not any(part.is_inference() for part in kept)
    assert files.keep(kept) == kept
    assert files.holds(kept[0][:, 1:2])
