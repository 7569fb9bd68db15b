"""A snapshot is a value: it stays, can be cropped, moved, continued and checked against its model."""

import dataclasses

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.exceptions import FingerprintMismatchError, NotCroppableError
from tiny_models import TINY_MODELS

STRATEGIES = ("prefix-dynamic", "prefix-static")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def snapshot_of(strategy, name="gemma3_text", tokens=11):
    model = TINY_MODELS[name]()
    ids = torch.randint(1, 99, (1, tokens))
    options = {"max_cache_len": 20} if strategy == "prefix-static" else {}
    cache_class = hpc.PrefixStaticCache if strategy == "prefix-static" else hpc.PrefixDynamicCache
    cache = cache_class(config=model.config, **options)
    logits = model(input_ids=ids, **cache_argument(cache)).logits[:, -1]
    return model, cache, cache.snapshot(model=model, input_ids=ids, next_logits=logits), ids, logits


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_snapshot_says_what_it_is(strategy):
    model, _, snapshot, ids, logits = snapshot_of(strategy)
    assert (snapshot.seq_length, snapshot.batch_size, snapshot.strategy) == (11, 1, strategy)
    assert torch.equal(snapshot.input_ids, ids)
    assert torch.equal(snapshot.next_logits, logits)
    assert not snapshot.is_lossy
    assert snapshot.padding_mask is None
    snapshot.verify(model)
    assert repr(snapshot).startswith(f"PrefixSnapshot(11 tokens, batch_size=1, strategy='{strategy}'")


def test_what_is_not_told_stays_unknown():
    _, cache, *_ = snapshot_of("prefix-dynamic")
    bare = cache.snapshot()
    assert (bare.input_ids, bare.next_logits, bare.fingerprint) == (None, None, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_told_is_copied(strategy):
    _, cache, _, ids, logits = snapshot_of(strategy)
    snapshot = cache.snapshot(input_ids=ids, next_logits=logits)
    right = ids.clone(), logits.clone()
    ids.zero_()
    logits.zero_()
    assert torch.equal(snapshot.input_ids, right[0])
    assert torch.equal(snapshot.next_logits, right[1])


def test_a_snapshot_cannot_be_assigned_to():
    _, _, snapshot, *_ = snapshot_of("prefix-dynamic")
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.seq_length = 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cropped_snapshot_knows_its_tokens_and_no_next_logits(strategy):
    _, _, snapshot, ids, _ = snapshot_of(strategy, name="llama")
    shorter = snapshot.crop_to(7)
    assert torch.equal(shorter.input_ids, ids[:, :7])
    assert (shorter.seq_length, shorter.next_logits) == (7, None)
    assert shorter.fingerprint == snapshot.fingerprint
    assert hpc.total_nbytes([shorter, snapshot]) == snapshot.nbytes
    assert snapshot.crop_to(11) is snapshot
    for layer in shorter.layers:
        assert (layer.length, layer.first) == (7, 0)


def test_cropping_a_snapshot_past_its_window_names_the_layer():
    _, _, snapshot, *_ = snapshot_of("prefix-dynamic")
    assert not snapshot.can_crop_to(5)
    with pytest.raises(NotCroppableError, match=r"layer 0 .*window of 8 tokens"):
        snapshot.crop_to(5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_snapshot_moves_to_another_device(strategy):
    _, _, snapshot, ids, _ = snapshot_of(strategy)
    moved = snapshot.to("meta")
    assert {tensor.device.type for layer in moved.layers for tensor in layer.tensors()} == {"meta"}
    assert moved.next_logits.device.type == "meta"
    assert torch.equal(moved.input_ids, ids)
    for here, there in zip(snapshot.tensors, snapshot.to("cpu").tensors, strict=True):
        assert torch.equal(here, there)


def test_a_snapshot_fits_no_model_with_other_weights():
    model, _, snapshot, *_ = snapshot_of("prefix-dynamic")
    model.lm_head.weight[3, 5] += 1
    with pytest.raises(FingerprintMismatchError, match="Gemma3ForCausalLM"):
        snapshot.verify(model)
    model.lm_head.weight[3, 5] -= 1
    model.set_attn_implementation("eager")
    with pytest.raises(FingerprintMismatchError):
        snapshot.verify(model)
