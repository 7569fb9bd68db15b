import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_prefix_cache.cli.app import app
from hf_prefix_cache.cli.eval import with_default_model


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "hf"],
        ["--model=hf"],
        ["-M", "hf"],
        ["-Mhf"],
        ["run", "--tasks", "a", "--model", "hf"],
        ["ls", "tasks"],
        ["validate", "--tasks", "a"],
        ["run", "--help"],
    ],
)
def test_a_model_that_is_named_and_other_commands_stay_as_they_are(arguments):
    assert with_default_model(arguments, "hf-prefix") == arguments


@pytest.mark.parametrize("arguments", [["--model_args", "pretrained=x"], ["run", "--tasks", "a"], ["-m"]])
def test_the_model_is_hf_prefix_unless_another_is_named(arguments):
    assert with_default_model(arguments, "hf-prefix") == [*arguments, "--model", "hf-prefix"]


@pytest.mark.parametrize(("content", "is_added"), [("model: hf\n", False), ("tasks: [a]\n", True), ("- a\n", True)])
@pytest.mark.parametrize("form", ["--config {}", "--config={}", "-C {}"])
def test_a_configuration_file_that_names_a_model_is_followed(tmp_path, content, is_added, form):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    given = form.format(path).split()
    assert (with_default_model(given, "hf-prefix") != given) == is_added


def test_help_explains_and_shows_the_harness_own_options():
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")
    before = sys.argv
    shown = run("--help")
    assert shown.exit_code == 0
    assert "--model hf-prefix" in shown.stdout
    assert "--num_fewshot" in shown.stdout
    assert sys.argv is before


def test_without_arguments_it_explains_itself_as_a_usage_error():
    shown = run()
    assert shown.exit_code == 2
    assert "--model hf-prefix" in shown.stdout


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.")] + [
        "hf_prefix_cache.integrations.lm_eval"
    ]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    shown = run("--tasks", "arc_easy")
    assert shown.exit_code == 1
    assert "pip install" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_an_evaluation_prints_the_harness_table_and_the_report(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[END]": 0, "a": 1, "Question": 2, "Answer": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", pad_token="[END]").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=4, **sizes)).save_pretrained(tmp_path)

    # The harness lists all of its tasks and all packages of the machine, which takes many seconds.
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    tasks = Path(__file__).parents[1] / "integrations" / "local_tasks"
    shown = run(
        *("--model_args", f"pretrained={tmp_path},dtype=float32", "--tasks", "animals_choice"),
        *("--include_path", str(tasks), "--device", "cpu", "--limit", "3"),
    )
    assert shown.exit_code == 0, shown.output
    table, report = shown.stdout.split("tokens with hf-prefix")
    assert "hf-prefix (" in table
    assert "acc_norm" in table
    assert "animals_choice" in report
