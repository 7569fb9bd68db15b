"""``hf-prefix-cache check``: a table or JSON, and an exit code that says whether anything is wrong."""

import json

import pytest
from typer.testing import CliRunner

import hf_prefix_cache as hpc
from hf_prefix_cache.cli.app import app
from tiny_models import TINY_MODELS

ARGUMENTS = ["check", "any", "--quick", "--strategy", "prefix-dynamic"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr("hf_prefix_cache.cli._loading.load_for_scoring", lambda name: (TINY_MODELS["llama"](), None))


def run(*arguments):
    return CliRunner().invoke(app, [*ARGUMENTS, *arguments], env={"COLUMNS": "200"})


def test_a_right_model_passes_and_the_numbers_are_shown():
    result = run()
    assert result.exit_code == 0, result.output
    assert "9 exact, 0 refused by name, 0 wrong" in result.output


def test_json_holds_every_cell():
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert {cell["outcome"] for cell in found["cells"]} == {"exact"}


def test_a_difference_is_a_failure(monkeypatch):
    monkeypatch.setattr(hpc.PrefixDynamicCache, "restore", lambda self, snapshot: None)
    result = run()
    assert result.exit_code == 1
    assert "1 wrong" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--dtype", "int8"], "the dtype 'int8' is not one of"), (["--strategy", "no"], "strategy is 'no'")],
)
def test_bad_options_are_one_clear_line(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
