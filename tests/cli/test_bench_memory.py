"""``hf-prefix-cache bench memory`` prints what quantized prefixes take and lose."""

import json
import sys

import pytest
from byte_model import save_model
from typer.testing import CliRunner

from hf_prefix_cache.cli.app import app

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

SIZES = ("--prefix", "150", "--tokens", "20")


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 8)
    return str(path)


def run_bench(*options):
    return CliRunner().invoke(app, ["bench", "memory", *options])


def error_of(*options):
    shown = run_bench(*options)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    return shown.stderr


def test_every_format_is_measured_and_drawn(text, byte_model, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "memory.png"
    shown = run_bench(text, "--model", byte_model, *SIZES, "--json", "--png", str(png))
    assert shown.exit_code == 0, shown.output
    results = json.loads(shown.stdout)
    assert (results["prefix_tokens"], results["scored_tokens"]) == (150, 20)
    names = [entry["name"] for entry in results["quantized"]]
    assert names[:3] == ["bitsandbytes, 8 bits", "bitsandbytes, nf4", "bitsandbytes, fp4"]
    assert len(names) + len(results["left_out"]) == 7
    eight, four, _ = results["quantized"][:3]
    assert (eight["bits_per_value"], four["bits_per_value"]) == (8.25, 4.625)
    assert four["nbytes"] < eight["nbytes"] < results["exact"]["nbytes"]
    assert abs(eight["perplexity"] / results["exact"]["perplexity"] - 1) < 0.01
    assert 0 < eight["error_of_keys"] < four["error_of_keys"]
    assert all(0 <= entry["greedy_agreement"] <= 64 for entry in results["quantized"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_people_see_a_table_and_which_packages_are_missing(text, byte_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "hqq", None)
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", "memory", text, "--model", byte_model, *SIZES])
    assert shown.exit_code == 0, shown.output
    assert "bitsandbytes, nf4" in shown.stdout
    assert "4.62" in shown.stdout
    assert "left out: hqq, 8 bits" in shown.stdout
    assert "pip install hqq" in shown.stdout


def test_what_cannot_be_measured_is_one_clear_line(text, byte_model, tmp_path):
    assert "which is no file" in error_of(str(tmp_path / "absent.txt"))
    assert "more than the 256 tokens" in error_of(text, "--model", byte_model, "--prefix", "5000")
    short = tmp_path / "short.txt"
    short.write_text("Once.")
    assert "are needed; name a longer text" in error_of(str(short), "--model", byte_model, *SIZES)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfa" * 100)
    assert "not text in UTF-8" in error_of(str(binary), "--model", byte_model, *SIZES)
    pytest.importorskip("matplotlib")
    png = str(tmp_path / "no" / "such.png")
    assert "cannot be written" in error_of(text, "--model", byte_model, *SIZES, "--png", png)
