"""Adapters, models that the harness' own code serves, several processes, and the real model on real tasks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_prefix_cache.exceptions import MissingPackageError

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")

from harness_runs import TASKS, answers, assert_same_answers, assert_same_results, evaluate, pairs
from lm_eval.models.huggingface import HFLM

from hf_prefix_cache.integrations.lm_eval import MODEL_NAME, PrefixHFLM

# PEFT asks Transformers by a name that is going away.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def count_calls(monkeypatch, name):
    """Count how often HFLM's own method runs."""
    calls, original = [], getattr(HFLM, name)

    def counted(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HFLM, name, counted)
    return calls


@peft_warns
def test_an_adapter_is_evaluated_and_not_its_base(folder, tmp_path, runs):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "lora")
    options = {"model_args": {"peft": str(tmp_path / "lora")}}
    found = evaluate(MODEL_NAME, folder, **options)
    assert_same_results(found, evaluate("hf", folder, **options))
    base = [logprob for logprob, _ in answers(runs["hf"])["animals_choice"]]
    adapted = [logprob for logprob, _ in answers(found)["animals_choice"]]
    assert max(abs(a - b) for a, b in zip(base, adapted, strict=True)) > 0.1
    by_task = {task["task"]: task for task in found["config"]["prefix_report"]["tasks"]}
    assert by_task["animals_choice"]["computed_tokens"] == by_task["animals_choice"]["unique_tokens"]
    assert by_task["animals_answer"]["reached_ratio"] > 4


@peft_warns
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_learned_prompts_are_scored_by_plain_rows_and_generate_without_reuse(folder, tokenizer):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    tasks = ["animals_letter", "animals_answer"]
    expected = evaluate(HFLM(model, tokenizer=tokenizer), folder, tasks=tasks, limit=3)
    with pytest.warns(UserWarning, match="generates without reusing prefixes: PEFT puts learned tokens"):
        found = evaluate(PrefixHFLM(model, tokenizer=tokenizer), folder, tasks=tasks, limit=3)
    assert_same_results(found, expected)
    (scored,) = found["config"]["prefix_report"]["tasks"]
    assert "rows route" in scored["note"]


def test_an_encoder_decoder_model_goes_through_the_harness_own_code(tokenizer, monkeypatch):
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    model = T5ForConditionalGeneration(config).eval()
    expected = evaluate(HFLM(model, tokenizer=tokenizer, max_length=256), None, limit=3)
    with pytest.warns(UserWarning, match="own code, without sharing prefixes, because .* has an encoder") as said:
        found = evaluate(PrefixHFLM(model, tokenizer=tokenizer, max_length=256), None, limit=3)
    assert len(said) == 1
    assert_same_results(found, expected)
    assert "has an encoder" in found["config"]["prefix_report"]["own_code"]


def test_a_model_on_several_devices_by_tensor_parallelism_goes_through_the_harness_own_code(
    folder, tokenizer, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model._tp_size = 2
    with pytest.warns(UserWarning, match="tensor parallelism"):
        lm = PrefixHFLM(model, tokenizer=tokenizer)
    calls = count_calls(monkeypatch, "_loglikelihood_tokens")
    lm.loglikelihood(pairs(("a", " cat")), disable_tqdm=True)
    assert calls == ["_loglikelihood_tokens"]


def test_a_missing_harness_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "hf_prefix_cache.integrations.lm_eval")
    with pytest.raises(MissingPackageError, match=r'pip install "hf-prefix-cache\[lm-eval\]"'):
        importlib.import_module("hf_prefix_cache.integrations.lm_eval")


SCRIPT = """
import json, os, sys
import lm_eval.evaluator
from lm_eval.tasks import TaskManager
import hf_prefix_cache.integrations.lm_eval as integration

lm_eval.evaluator.add_env_info = lambda storage: None
folder, tasks, out = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model="hf-prefix",
    model_args={"pretrained": folder, "dtype": "float32"},
    tasks=["animals_choice", "animals_letter", "animals_text", "animals_answer"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    device="cpu",
    batch_size=4,
    bootstrap_iters=0,
)
rank = os.environ["RANK"]
with open(f"{out}/{rank}.json", "w") as file:
    kept = None if results is None else {"results": results["results"], "samples": results["samples"]}
    report = integration.last_prefix_report()
    json.dump({"report": report.as_dict(), "text": str(report), "results": kept}, file, default=float)
"""


def test_two_processes_share_the_documents_and_give_the_scores_of_one(folder, runs, tmp_path):
    script = tmp_path / "evaluate.py"
    script.write_text(SCRIPT)
    source = str(Path(importlib.import_module("hf_prefix_cache").__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    # accelerate's --cpu starts several processes through MPI only; this is its way without.
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    command = [*launch, str(script), str(folder), str(TASKS), str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert second["results"] is None
    said, meant = answers(first["results"]), answers(runs["hf"])
    for task, expected in meant.items():
        found = [tuple(answer) if isinstance(answer, list) else answer for answer in said[task]]
        assert_same_answers(found, expected)

    alone = runs[MODEL_NAME]["config"]["prefix_report"]
    for rank, run in enumerate((first, second)):
        report = run["report"]
        assert (report["rank"], report["processes"]) == (rank, 2)
        assert f"rank {rank} of 2" in run["text"]
    requested = sum(run["report"]["total"]["requested_tokens"] for run in (first, second))
    assert requested == alone["total"]["requested_tokens"]
    choice = [run["report"]["tasks"][0] for run in (first, second)]
    # Each rank computes the few-shot prefix, and nothing else is computed twice.
    again = sum(task["computed_tokens"] for task in choice) - alone["tasks"][0]["computed_tokens"]
    assert 0 < choice[0]["root_tokens"] <= again <= choice[0]["root_tokens"] + 30


def shared_data():
    """The folder of real requests and texts beside the project, or None."""
    named = os.environ.get("HF_PREFIX_CACHE_DATA")
    places = [Path(named)] if named else [parent / "shared" / "data" for parent in Path(__file__).resolve().parents]
    return next((place for place in places if (place / "mmlu").is_dir()), None)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mmlu_anatomy_local", "arc_easy_local"])
def test_real_tasks_on_the_real_model_get_the_harness_own_scores(task, packaged_model, monkeypatch):
    data = shared_data()
    if data is None:
        pytest.skip("no folder shared/data beside the project, and HF_PREFIX_CACHE_DATA names none")
    monkeypatch.setenv("HF_PREFIX_CACHE_DATA", str(data))
    model, tokenizer = packaged_model
    expected, found = (
        evaluate(kind(model, tokenizer=tokenizer, batch_size=8), None, tasks=[task], limit=10)
        for kind in (HFLM, PrefixHFLM)
    )
    assert_same_results(found, expected)
    assert found["config"]["prefix_report"]["total"]["reached_ratio"] > 3
