"""The installed command: its help comes without PyTorch, and what it runs has the whole package."""

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from hf_prefix_cache.cli._command import PackageCommand
from hf_prefix_cache.cli.app import app

PROGRAM = """
import json, sys
from hf_prefix_cache_command import main
try:
    main()
except SystemExit as end:
    code = end.code
heavy = sorted({"torch", "transformers"} & set(sys.modules))
if "hf_prefix_cache" in sys.modules and heavy:
    from transformers import GenerationConfig
    GenerationConfig(cache_implementation="prefix-dynamic").validate(strict=True)
print(json.dumps([code, heavy]), file=sys.stderr)
"""


def run(*arguments):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    code, heavy = json.loads(ended.stderr.splitlines()[-1])
    return code, heavy, ended.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["plan", "--help"], ["score", "--help"]])
def test_help_comes_without_pytorch(arguments):
    code, heavy, shown = run(*arguments)
    assert (code, heavy) == (0, [])
    assert "Usage: hf-prefix-cache" in shown or "Usage: -c" in shown


@pytest.mark.parametrize("arguments", [["--version"], ["demonstrate"], ["plan", "--jsn", "file"]])
def test_versions_and_wrong_arguments_come_without_pytorch(arguments):
    _, heavy, _ = run(*arguments)
    assert heavy == []


def test_a_command_that_runs_has_registered_the_names(tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"context_ids": [1, 2], "continuation_ids": [3]}))
    code, heavy, shown = run("plan", str(requests), "--json")
    assert (code, heavy) == (0, ["torch", "transformers"])
    assert json.loads(shown)["requests"] == 1


def test_every_command_imports_the_package_when_it_runs():
    def leaves(command):
        below = getattr(command, "commands", None)
        return [leaf for name in below for leaf in leaves(below[name])] if below else [command]

    commands = leaves(get_command(app))
    assert len(commands) > 3
    assert all(isinstance(command, PackageCommand) for command in commands)
