"""What ``hf-prefix-cache inspect`` says of a directory of prefixes."""

import json
import os

import pytest
import torch
from byte_model import save_model
from typer.testing import CliRunner

import hf_prefix_cache as hpc
from hf_prefix_cache.cli.app import app
from saved_prefixes import make_prefix
from tiny_models import llama, mistral


@pytest.fixture
def folder(tmp_path):
    """A store's directory with two prefixes that share 20 tokens, one of a tenant, and one saved by hand."""
    model = llama()
    store = hpc.PrefixStore(max_bytes=10_000_000, directory=tmp_path, max_directory_bytes=10_000_000)
    prefix = make_prefix(model, "prefix-dynamic", length=30)
    store.insert(prefix)
    store.insert(prefix.crop_to(20))
    store.insert(prefix.crop_to(12), "tenant")
    store.flush()
    make_prefix(mistral(), "prefix-dynamic", length=9).save(tmp_path / "rules.safetensors")
    return tmp_path


def run(*options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", *map(str, options)])


def results(*options, code=0):
    shown = run(*options, "--json")
    assert shown.exit_code == code, shown.output
    return json.loads(shown.stdout)


def test_the_tree_shows_shared_tokens_once_and_where_prefixes_end(folder):
    shown = run(folder, "--verify")
    assert shown.exit_code == 0, shown.output
    lines = [line.strip("│├└─ ") for line in shown.stdout.splitlines()]
    (run_of_twenty,) = [place for place, line in enumerate(lines) if line.startswith("20 tokens: ")]
    assert lines[run_of_twenty + 1].startswith("20 tokens in ")
    assert lines[run_of_twenty + 2].startswith("10 tokens: ")
    assert lines[run_of_twenty + 3].startswith("30 tokens in ")
    assert any("namespace tenant" in line for line in lines)
    assert any("rules.safetensors" in line for line in lines)
    assert lines[-1].startswith("4 prefixes, ")
    assert lines[-1].endswith("every bit checked")


def test_the_results_name_every_file(folder):
    files = {file["file"]: file for file in results(folder)["files"]}
    assert sorted(file["seq_length"] for file in files.values()) == [9, 12, 20, 30]
    rules = files["rules.safetensors"]
    assert (rules["model_type"], rules["strategy"], rules["error"]) == ("mistral", "prefix-dynamic", None)
    assert len(rules["input_ids"]) == 9
    assert rules["bytes"] == os.path.getsize(folder / "rules.safetensors")
    assert {file["namespace"] for file in files.values()} == {"", "tenant"}


def test_a_damaged_file_is_named_and_the_exit_code_says_so(folder):
    path = folder / "rules.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert results(folder)["files"][-1]["error"] is None  # the header is whole
    shown = run(folder, "--verify")
    assert shown.exit_code == 1
    assert "unreadable rules.safetensors" in shown.stdout
    assert "does not match" in results(folder, "--verify", code=1)["files"][-1]["error"]


def test_pruning_keeps_what_was_used_last_and_what_was_saved_by_hand(folder):
    files = {file["seq_length"]: file for file in results(folder)["files"]}
    for age, tokens in enumerate((20, 30, 12)):
        os.utime(folder / files[tokens]["file"], (1_000_000_000 - age, 1_000_000_000 - age))
    found = results(folder, "--prune", files[20]["bytes"])
    assert sorted(found["pruned"]) == sorted(files[tokens]["file"] for tokens in (30, 12))
    assert sorted(file["seq_length"] for file in found["files"]) == [9, 20]
    (folder / "set-aside").mkdir()
    (folder / "set-aside" / "bad").write_text("bad")
    assert results(folder, "--prune", "0")["pruned"][-1] == "set-aside/bad"
    assert [file["file"] for file in results(folder)["files"]] == ["rules.safetensors"]


@pytest.mark.parametrize("size", ["much", "-1", "", "1XB", "inf"])
def test_a_size_that_is_none_is_refused(folder, size):
    shown = run(folder, f"--prune={size}")
    assert shown.exit_code == 1
    assert "such as 500MB" in shown.stderr
    assert len(list(folder.glob("*.safetensors"))) == 4


def test_sizes_are_written_with_units(folder):
    assert results(folder, "--prune", "1.5 GB")["pruned"] == []
    assert len(results(folder, "--prune", "0k")["pruned"]) == 3


def test_text_stands_in_place_of_ids_where_a_tokenizer_is_named(tmp_path):
    model_folder = save_model(tmp_path / "model")
    model, tokenizer = hpc.packaged_model.load_model(str(model_folder))
    wrapped = hpc.PrefixCachedModel(model, tokenizer)
    (tmp_path / "saved").mkdir()
    wrapped.prefill("The rules of the house").save(tmp_path / "saved" / "rules.safetensors")
    shown = run(tmp_path / "saved", "--tokenizer", model_folder)
    assert shown.exit_code == 0, shown.output
    assert "The rules of the house" in shown.stdout


def test_a_folder_that_is_not_there_or_empty(tmp_path):
    shown = run(tmp_path / "nothing")
    assert shown.exit_code == 1
    assert "is not a directory" in shown.stderr
    assert results(tmp_path)["files"] == []
    assert torch.is_grad_enabled()
