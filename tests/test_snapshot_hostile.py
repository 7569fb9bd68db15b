"""Snapshot files that are cut off, damaged, of another time or made to harm: one typed error, nothing taken over."""

import contextlib
import json
import random
import re
import resource
import zlib

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache import tensor_file
from hf_prefix_cache.exceptions import PrefixCacheError, SnapshotFileError
from hf_prefix_cache.snapshot_file import read_snapshot_header
from saved_prefixes import make_prefix
from tiny_models import gemma3_text, llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "prefix.safetensors"
    make_prefix(gemma3_text(), "prefix-dynamic", length=30).save(path)
    return path.read_bytes()


def load(path, model=None):
    return hpc.PrefixSnapshot.load(path, model=model, unverified=model is None)


def parts_of(raw):
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def sealed(header, body):
    """Return a file whose checksum is right, whatever is in it."""
    header["__metadata__"]["checksum"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(text)
    with contextlib.suppress(TypeError, ValueError):  # entries that are malformed are refused before the checksum
        for start, stop in sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"):
            checksum = tensor_file._checksum(memoryview(body)[start:stop], checksum)
    text = text.replace(b'"checksum":"00000000"', f'"checksum":"{checksum:08x}"'.encode())
    return len(text).to_bytes(8, "little") + text + body


def described(header, change):
    description = json.loads(header["__metadata__"]["prefix"])
    change(description)
    header["__metadata__"]["prefix"] = json.dumps(description)


def refused(raw, tmp_path, match="cannot be used"):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(raw)
    with pytest.raises(SnapshotFileError, match=match) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_file_that_was_sealed_again_unchanged_is_loaded(saved, tmp_path):
    path = tmp_path / "sealed"
    path.write_bytes(sealed(*parts_of(saved)))
    assert load(path, gemma3_text()).seq_length == 30


@pytest.mark.parametrize("kept", [0, 1, 8, 9, 100, -1, -1000])
def test_a_file_that_is_cut_off_is_refused(saved, kept, tmp_path):
    refused(saved[:kept], tmp_path)


def test_a_file_with_something_behind_its_end_is_refused(saved, tmp_path):
    refused(saved + b"x", tmp_path)


@pytest.mark.parametrize("claimed", [2**63, 2**40, 10**9])
def test_a_header_that_claims_billions_of_bytes_is_refused(saved, claimed, tmp_path):
    refused(claimed.to_bytes(8, "little") + saved[8:], tmp_path, "claims")


def test_an_unknown_version_is_named(saved, tmp_path):
    header, body = parts_of(saved)
    header["__metadata__"]["format"] = "hf-prefix-cache 99"
    refused(sealed(header, body), tmp_path, "hf-prefix-cache 99")


def test_a_file_of_safetensors_that_is_no_snapshot_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"layers.0.keys": torch.zeros(3)}, tmp_path / "weights.safetensors")
    refused((tmp_path / "weights.safetensors").read_bytes(), tmp_path, "not saved by hf-prefix-cache")


def change_entry(name, **changes):
    return lambda header: header[name].update(changes)


HEADERS = {
    "a shape of billions": change_entry("layers.1.keys", shape=[1, 2, 10**9, 8]),
    "a shape below zero": change_entry("layers.1.keys", shape=[1, 2, -30, 8]),
    "a shape that is text": change_entry("layers.1.keys", shape="1, 2"),
    "a size that is a fraction": change_entry("layers.1.keys", shape=[1, 2, 30.0, 8]),
    "an unknown dtype": change_entry("layers.1.keys", dtype="F4"),
    "another dtype": change_entry("layers.1.keys", dtype="I32"),
    "another dtype of values": change_entry("layers.1.values", dtype="I32"),
    "token ids of another dtype": change_entry("input_ids", dtype="F64"),
    "offsets behind the end": change_entry("layers.1.keys", data_offsets=[0, 10**12]),
    "offsets that overlap": change_entry("layers.1.keys", data_offsets=[0, 1920]),
    "another shape of equal size": change_entry("layers.1.keys", shape=[1, 2, 15, 16]),
    "three dimensions": change_entry("layers.1.keys", shape=[2, 30, 8]),
    "a name that nothing speaks of": lambda header: header.update(other=header.pop("layers.1.keys")),
    "a missing checksum": lambda header: header["__metadata__"].pop("checksum"),
    "no description": lambda header: header["__metadata__"].pop("prefix"),
    "a description that is no JSON": lambda header: header["__metadata__"].update(prefix="{"),
    "a description that is deep": lambda header: header["__metadata__"].update(prefix="[" * 100_000),
    "no metadata": lambda header: header.pop("__metadata__"),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_contradicts_itself_is_refused(saved, change, tmp_path):
    header, body = parts_of(saved)
    HEADERS[change](header)
    refused(
        sealed(header, body) if "checksum" in header.get("__metadata__", {}) else rewritten(header, body),
        tmp_path,
        ".",
    )


def rewritten(header, body):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


DESCRIPTIONS = {
    "no table": lambda _: None,
    "fewer tokens than it has": lambda d: d.update(seq_length=29),
    "billions of tokens": lambda d: d.update(seq_length=10**12),
    "no tokens": lambda d: d.update(seq_length=0),
    "a strategy that does not exist": lambda d: d.update(strategy="pickle"),
    "a lossy prefix that is exact": lambda d: d.update(is_lossy=True),
    "a fingerprint that is a number": lambda d: d.update(fingerprint=7),
    "a model that does not exist": lambda d: d["config"].update(model_type="no-such-model"),
    "a model without a type": lambda d: d.update(config={}),
    "a smaller vocabulary": lambda d: d["config"].update(vocab_size=3),
    "more layers": lambda d: d["config"].update(num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "another window": lambda d: d["layers"][0].update(window=9),
    "no window": lambda d: d["layers"][0].update(window=None),
    "a layer of another length": lambda d: d["layers"][1].update(length=10**9),
    "a layer of an unknown kind": lambda d: d["layers"][1].update(kind="pickled"),
    "a running state": lambda d: d["layers"][1].update(kind="running", widths=[4], conv=[True], recurrent=[False]),
    "quantized without a scheme": lambda d: d["layers"][1].update(kind="quantized", segments=[]),
    "a scheme of another package": lambda d: d.update(scheme={"name": "x", "options": {"backend": "os.system"}}),
    "layers that are text": lambda d: d.update(layers="attention"),
}


@pytest.mark.parametrize("change", DESCRIPTIONS)
def test_a_description_that_does_not_fit_the_tensors_is_refused(saved, change, tmp_path):
    header, body = parts_of(saved)
    if change == "no table":
        header["__metadata__"]["prefix"] = "[]"
    else:
        described(header, DESCRIPTIONS[change])
    refused(sealed(header, body), tmp_path, ".")


def test_token_ids_out_of_the_vocabulary_are_refused(saved, tmp_path):
    header, body = parts_of(saved)
    start = header["input_ids"]["data_offsets"][0]
    refused(sealed(header, body[:start] + (99).to_bytes(8, "little") + body[start + 8 :]), tmp_path, "token ids")


def test_a_link_out_of_its_directory_is_refused(saved, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "prefix").write_bytes(saved)
    (inside / "prefix").symlink_to(outside / "prefix")
    with pytest.raises(SnapshotFileError, match="out of its directory"):
        load(inside / "prefix")
    (outside / "link").symlink_to(outside / "prefix")
    assert load(outside / "link").seq_length == 30


def mutations(raw, rng):
    """Yield changed files: flipped bits, cut, moved and repeated parts, and headers with other words in them."""
    length = int.from_bytes(raw[:8], "little")
    for _ in range(120):
        place = rng.randrange(len(raw)) if rng.random() < 0.5 else rng.randrange(8 + length)
        yield raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    for _ in range(30):
        yield raw[: rng.randrange(len(raw))]
    for _ in range(30):
        start, stop = sorted(rng.randrange(len(raw)) for _ in range(2))
        yield raw[:start] + raw[stop:]
    for _ in range(20):
        start, stop, other = (rng.randrange(len(raw)) for _ in range(3))
        yield raw[:start] + raw[other : other + 50] + raw[stop:]
    text = raw[8 : 8 + length].decode()
    numbers = list(re.finditer(r"\d+", text))
    for _ in range(60):
        found = rng.choice(numbers)
        other = rng.choice(["-1", "0", "1e9", "99999999999999999999", '"x"', "null", "[]", str(rng.randrange(10**9))])
        changed = (text[: found.start()] + other + text[found.end() :]).encode()
        yield len(changed).to_bytes(8, "little") + changed + raw[8 + length :]
    for _ in range(20):
        yield rng.randbytes(rng.randrange(2_000))


def test_two_hundred_and_eighty_changed_files_raise_typed_errors_only(saved, tmp_path):
    rng = random.Random(0)
    path = tmp_path / "mutated.safetensors"
    tried = 0
    for changed in mutations(saved, rng):
        if changed == saved:
            continue
        path.write_bytes(changed)
        with pytest.raises(PrefixCacheError):
            load(path)
        tried += 1
    assert tried >= 200


def test_changed_files_that_are_sealed_again_load_as_they_should_or_raise_typed_errors(saved, tmp_path):
    """Where the checksum is right, the rules alone decide; what is loaded all the same can be continued."""
    rng = random.Random(1)
    path = tmp_path / "sealed.safetensors"
    header, body = parts_of(saved)
    text = json.dumps(json.loads(header["__metadata__"]["prefix"])["layers"])
    numbers = list(re.finditer(r"\d+|null|true|false|\"[a-z_]+\"", text))
    refusals = 0
    for _ in range(60):
        found = rng.choice(numbers)
        other = rng.choice(["-1", "0", "7", "1e9", "10000000000", '"x"', "null", "[]", "{}", "true"])
        layers = text[: found.start()] + other + text[found.end() :]
        try:
            changed = json.loads(layers)
        except ValueError:
            continue
        copied = json.loads(json.dumps(header))
        described(copied, lambda d, changed=changed: d.update(layers=changed))
        path.write_bytes(sealed(copied, body))
        try:
            loaded = load(path)
        except PrefixCacheError:
            refusals += 1
        else:
            loaded.to_cache()
    assert refusals > 20


def test_no_hostile_file_takes_memory_beyond_twice_its_size(tmp_path):
    big = tmp_path / "big.safetensors"
    make_prefix(llama(), "prefix-dynamic", length=20).save(big)
    header, body = parts_of(big.read_bytes())
    filler = 64 * 2**20
    end = len(body)
    header["filler"] = {"dtype": "U8", "shape": [filler], "data_offsets": [end, end + filler]}
    big.write_bytes(sealed(header, body + bytes(filler)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotFileError, match="filler"):
        load(big)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2 * filler


def test_the_header_alone_is_refused_by_the_same_rules(saved, tmp_path):
    path = tmp_path / "cut"
    path.write_bytes(saved[:-1])
    with pytest.raises(SnapshotFileError):
        read_snapshot_header(path)
