"""One store for each model, sized by the memory that is free, gone with its model."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from store_prefixes import held_tensors

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.fingerprint import fingerprint_of
from hf_prefix_cache.store import defaults


def store_a_prefix(model, ids):
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **cache_argument(cache))
    hpc.store_for(model).insert(cache.snapshot(model=model, input_ids=ids))


def test_a_model_has_one_store_of_an_eighth_of_the_free_memory(tiny_model, monkeypatch):
    model, other = tiny_model("llama"), tiny_model("llama")
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: SimpleNamespace(available=80_000))
    assert hpc.store_for(model).max_bytes == 10_000
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    assert hpc.store_for(model).max_bytes == 10_000
    assert hpc.store_for(model) is hpc.store_for(model)
    assert hpc.store_for(other) is not hpc.store_for(model)
    assert hpc.store_for(other).max_bytes == 100


def test_on_an_accelerator_its_own_memory_counts(monkeypatch):
    asked = []
    backend = SimpleNamespace(mem_get_info=lambda device: asked.append(device) or (4_000, 9_000))
    monkeypatch.setattr(defaults.torch, "get_device_module", lambda device: backend)
    model = SimpleNamespace(device=torch.device("cuda", 1))
    assert defaults._free_bytes(model) == 4_000
    assert asked == [torch.device("cuda", 1)]


def test_models_may_share_a_store_and_do_not_see_each_others_prefixes(tiny_model):
    llama, qwen = tiny_model("llama"), tiny_model("qwen3")
    shared = hpc.PrefixStore(max_bytes=1_000_000)
    hpc.set_store(llama, shared)
    hpc.set_store(qwen, shared)
    ids = torch.tensor([[5, 6, 7]])
    store_a_prefix(llama, ids)
    assert hpc.store_for(qwen) is shared
    assert shared.match(ids, fingerprint_of(llama)).seq_length == 3
    assert shared.match(ids, fingerprint_of(qwen)) is None


def test_after_invalidate_nothing_that_the_model_computed_is_found(tiny_model):
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    store_a_prefix(model, ids)
    stale = fingerprint_of(model)
    model.lm_head.weight.data[3, 5] += 1  # shows in no version counter, and hardly in a few sampled values
    hpc.invalidate(model)
    assert hpc.store_for(model).match(ids, stale) is None
    assert hpc.store_for(model).nbytes == 0
    assert fingerprint_of(model) != stale
    hpc.invalidate(tiny_model("llama"))


def test_a_model_that_goes_takes_its_store_along(tiny_model):
    model = tiny_model("mistral")
    store_a_prefix(model, torch.tensor([[5, 6, 7]]))
    store = weakref.ref(hpc.store_for(model))
    references = [weakref.ref(tensor) for tensor in held_tensors(store())]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert store() is None
    assert references
    assert not any(reference() is not None for reference in references)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elsewhere_the_machines_memory_counts(device, monkeypatch):
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    model = SimpleNamespace(device=torch.device(device), modules=lambda: [])
    assert defaults._free_bytes(model) == 7
