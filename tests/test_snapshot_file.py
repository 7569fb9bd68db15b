"""A snapshot in a file: every bit comes back, in any process, for the model that computed it and no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_prefix_cache as hpc
import saved_prefixes
from hf_prefix_cache.exceptions import (
    FingerprintMismatchError,
    InputMismatchError,
    SnapshotFileError,
    SnapshotIncompleteError,
)
from hf_prefix_cache.snapshot_file import read_snapshot_header
from saved_prefixes import MODELS, STRATEGIES, continuation, is_served, make_prefix
from tiny_models import build, gemma3_text, llama

pytest.importorskip("bitsandbytes")


def same_bits(snapshot, other):
    ours = [tensor for layer in snapshot.layers for tensor in layer.compact().tensors()]
    theirs = [tensor for layer in other.layers for tensor in layer.tensors()]
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(snapshot.input_ids, other.input_ids)
    assert torch.equal(snapshot.next_logits, other.next_logits)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_comes_back(name, strategy, tmp_path):
    model = MODELS[name]()
    if not is_served(model, strategy):
        pytest.skip("refused on this Transformers release")
    snapshot = make_prefix(model, strategy, length=110)
    path = tmp_path / "prefix.safetensors"
    snapshot.save(path)
    loaded = hpc.PrefixSnapshot.load(path, model=model)
    same_bits(snapshot, loaded)
    assert loaded.config is not snapshot.config or loaded.config is model.config
    for attribute in ("seq_length", "batch_size", "strategy", "fingerprint", "is_lossy", "lossy_key"):
        assert getattr(loaded, attribute) == getattr(snapshot, attribute)
    assert list(map(type, loaded.layers)) == list(map(type, snapshot.layers))
    assert torch.equal(continuation(model, loaded), continuation(model, snapshot))
    alone = hpc.PrefixSnapshot.load(path, model=None, unverified=True)
    same_bits(snapshot, alone)
    assert torch.equal(continuation(model, alone), continuation(model, snapshot))
    assert os.listdir(tmp_path) == [path.name]


def test_another_process_goes_on_as_if_nothing_had_been_between(tmp_path):
    expected = {}
    for name, build_model in MODELS.items():
        model = build_model()
        for strategy in (strategy for strategy in STRATEGIES if is_served(model, strategy)):
            snapshot = make_prefix(model, strategy)
            file = f"{name}+{strategy}.safetensors"
            snapshot.save(tmp_path / file)
            expected[file] = continuation(model, snapshot)
    script = Path(saved_prefixes.__file__)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == expected.keys()
    for file, logits in expected.items():
        assert torch.equal(found[file], logits), file


def test_the_file_is_one_of_safetensors_with_all_that_is_said_of_it(tmp_path):
    snapshot = make_prefix(gemma3_text(), "prefix-dynamic", length=20)
    snapshot.save(tmp_path / "prefix.safetensors")
    tensors = load_file(tmp_path / "prefix.safetensors")
    assert torch.equal(tensors["input_ids"], snapshot.input_ids)
    assert torch.equal(tensors["layers.1.keys"], snapshot.layers[1].segments[0].keys)
    raw = (tmp_path / "prefix.safetensors").read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert metadata["format"] == "hf-prefix-cache 1"
    header, ids = read_snapshot_header(tmp_path / "prefix.safetensors")
    assert torch.equal(ids, snapshot.input_ids)
    assert header.fingerprint == snapshot.fingerprint
    assert (header.seq_length, header.batch_size, header.strategy) == (20, 1, "prefix-dynamic")
    assert header.layer_kinds == ("attention", "attention")


def test_what_is_loaded_is_the_mapped_file_and_writing_to_it_leaves_the_file(tmp_path):
    model = llama()
    path = tmp_path / "prefix.safetensors"
    make_prefix(model, "prefix-dynamic").save(path)
    before = path.read_bytes()
    loaded = hpc.PrefixSnapshot.load(path, model=model)
    storages = {tensor.untyped_storage().data_ptr() for layer in loaded.layers for tensor in layer.tensors()}
    assert len(storages) == 1
    expected = continuation(model, loaded)
    path.unlink()  # what is mapped stays
    assert torch.equal(continuation(model, loaded), expected)
    loaded.layers[0].segments[0].keys.zero_()
    assert not path.exists()
    path.write_bytes(before)
    assert torch.equal(continuation(model, hpc.PrefixSnapshot.load(path, model=model)), expected)


def test_several_rows_with_padding_come_back(tmp_path):
    model = llama()
    cache = hpc.PrefixDynamicCache(config=model.config)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    prepared = cache.prepare_inputs(ids, ids != 0)
    with torch.no_grad():
        model(**prepared._asdict(), **hpc.compat.cache_argument(cache))
    snapshot = cache.snapshot(model=model, input_ids=ids)
    snapshot.save(tmp_path / "rows")
    loaded = hpc.PrefixSnapshot.load(tmp_path / "rows", model=model)
    assert torch.equal(loaded.padding_mask, snapshot.padding_mask)
    assert (loaded.batch_size, loaded.next_logits) == (2, None)


def test_a_prefix_made_in_inference_mode_can_be_saved_and_trained_on(tmp_path):
    model = llama()
    with torch.inference_mode():
        make_prefix(model, "prefix-dynamic", length=9).save(tmp_path / "prefix")
        loaded = hpc.PrefixSnapshot.load(tmp_path / "prefix", model=model)
    model(input_ids=torch.tensor([[1, 2]]), **hpc.compat.cache_argument(loaded.to_cache())).logits.sum().backward()


def test_another_model_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    model = llama()
    make_prefix(model, "prefix-dynamic", length=9).save(tmp_path / "prefix")
    other = build(model.config, seed=1)
    with pytest.raises(FingerprintMismatchError, match="other weights"):
        hpc.PrefixSnapshot.load(tmp_path / "prefix", model=other)
    assert hpc.PrefixSnapshot.load(tmp_path / "prefix", model=other, unverified=True).seq_length == 9
    with pytest.raises(InputMismatchError, match="other settings"):
        hpc.PrefixSnapshot.load(tmp_path / "prefix", model=gemma3_text(), unverified=True)
    with pytest.raises(InputMismatchError, match="unverified=True"):
        hpc.PrefixSnapshot.load(tmp_path / "prefix", model=None)


def test_what_does_not_know_its_tokens_or_its_model_is_not_saved(tmp_path):
    model = llama()
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]), **hpc.compat.cache_argument(cache))
    for told, missing in (({"model": model}, "input_ids"), ({"input_ids": torch.tensor([[1, 2]])}, "fingerprint")):
        with pytest.raises(SnapshotIncompleteError, match=missing):
            cache.snapshot(**told).save(tmp_path / "prefix")
    assert not os.listdir(tmp_path)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model = llama()
    path = tmp_path / "prefix"
    make_prefix(model, "prefix-dynamic", length=9).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        make_prefix(model, "prefix-dynamic", length=12).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["prefix"]


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        hpc.PrefixSnapshot.load(tmp_path / "nothing", model=None, unverified=True)
    with pytest.raises(OSError, match="irectory"):
        hpc.PrefixSnapshot.load(tmp_path, model=None, unverified=True)


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path):
    snapshot = make_prefix(llama(), "prefix-dynamic", length=9)
    object.__setattr__(snapshot, "next_logits", snapshot.next_logits.to(torch.complex64))
    with pytest.raises(SnapshotFileError, match="complex64"):
        snapshot.save(tmp_path / "prefix")
    assert not os.listdir(tmp_path)
