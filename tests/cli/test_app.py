from importlib import metadata

from typer.testing import CliRunner

from hf_prefix_cache.cli.app import app


def test_help_names_every_subcommand():
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert "demo" in shown.stdout


def test_version_names_this_package_and_what_it_runs_on():
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("hf-prefix-cache ")
    assert f"transformers {metadata.version('transformers')}" in shown.stdout


def test_a_command_that_does_not_exist_is_a_usage_error():
    assert CliRunner().invoke(app, ["demonstrate"]).exit_code == 2
