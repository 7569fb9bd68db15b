import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_prefix_cache.exceptions import MissingPackageError

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_prefix_cache.integrations.lm_eval import MODEL_NAME, PrefixHFLM, last_prefix_report

TASKS = Path(__file__).parent / "local_tasks"
ALL_TASKS = ("animals_choice", "animals_letter", "animals_text", "animals_answer")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{{ '[a]' if add_generation_prompt }}"


# PEFT asks Transformers by a name that is going away.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def _no_inventory():
    """Spare each evaluation the seconds in which the harness lists the machine's packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        yield


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((TASKS / "animals.jsonl").read_text().splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A folder with a tiny random Llama and its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runs(folder):
    """Every task, by the harness' own model and by ours."""
    return {name: evaluate(name, folder) for name in ("hf", MODEL_NAME)}


def evaluate(model, folder, *, tasks=ALL_TASKS, model_args=None, batch_size=4, **options):
    if isinstance(model, str):
        options["model_args"] = {"pretrained": str(folder), "dtype": "float32", **(model_args or {})}
    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        device="cpu",
        batch_size=batch_size,
        bootstrap_iters=0,
        **options,
    )


def answers(results):
    """What the model said to each request, by task and document, flat."""
    return {
        task: [answer for sample in sorted(samples, key=lambda s: s["doc_id"]) for answer in _flat(sample["resps"])]
        for task, samples in results["samples"].items()
    }


def _flat(resps):
    return [resp for of_request in resps for resp in of_request]


def assert_same_results(found, expected, *, tolerance=1e-4):
    assert found["results"].keys() == expected["results"].keys()
    for task, metrics in expected["results"].items():
        assert _numbers(found["results"][task]) == pytest.approx(_numbers(metrics), rel=1e-5)
    said, meant = answers(found), answers(expected)
    assert said.keys() == meant.keys()
    for task in meant:
        assert_same_answers(said[task], meant[task], tolerance=tolerance)


def _numbers(metrics):
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def assert_same_answers(found, expected, *, tolerance=1e-4):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):
            assert one[1] == other[1]
            one, other = one[0], other[0]
        if isinstance(other, str):
            assert one == other
        else:
            # HFLM sums in float32, whose own rounding grows with the sum.
            torch.testing.assert_close(float(one), float(other), atol=tolerance, rtol=1e-6)


def pairs(*texts, task="pairs"):
    return [Instance("loglikelihood", {}, pair, index, (task, index, 1)) for index, pair in enumerate(texts)]


def plain_logprob(model, context, continuation):
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation[:-1]])).logits[0, -len(continuation) :]
    return logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()


def count_calls(monkeypatch, name):
    """Count how often HFLM's own method runs."""
    calls, original = [], getattr(HFLM, name)

    def counted(self, *args, **kwargs):
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HFLM, name, counted)
    return calls


def test_the_name_is_registered_with_the_harness():
    assert get_model("hf-prefix") is PrefixHFLM


def test_every_kind_of_task_gets_the_metrics_and_answers_of_the_harness_own_model(runs):
    assert_same_results(runs[MODEL_NAME], runs["hf"])


def test_generation_is_compared_on_texts_that_differ(runs):
    assert len(set(answers(runs["hf"])["animals_answer"])) > 3


def test_the_report_counts_the_tokens_of_each_task(runs):
    report = runs[MODEL_NAME]["config"]["prefix_report"]
    by_task = {task["task"]: task for task in report["tasks"]}
    assert set(by_task) == set(ALL_TASKS)
    for task in by_task.values():
        assert task["reused_tokens"] == task["requested_tokens"] - task["computed_tokens"]
        assert task["unique_tokens"] <= task["computed_tokens"] <= task["grouped_tokens"] <= task["requested_tokens"]
    choice = by_task["animals_choice"]
    assert choice["requests"] == 30
    assert choice["computed_tokens"] == choice["unique_tokens"]
    assert choice["reached_ratio"] > 8
    assert by_task["animals_answer"]["reached_ratio"] > 4
    assert report["total"]["computed_tokens"] == sum(task["computed_tokens"] for task in by_task.values())


def test_the_report_counts_what_the_model_was_fed(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    fed = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    lm = PrefixHFLM(model, tokenizer=tokenizer, self_check=False)
    lm.loglikelihood(pairs(("Which animal purrs?", " a cat"), ("Which animal purrs?", " an owl")), disable_tqdm=True)
    assert lm.prefix_report().total.computed_tokens == sum(fed)


def test_the_last_report_is_found_without_the_model(runs):
    assert str(last_prefix_report()).startswith("tokens with hf-prefix")
    assert json.loads(json.dumps(last_prefix_report().as_dict())) == last_prefix_report().as_dict()


def test_a_loaded_model_and_a_chat_template_keep_their_meaning(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected, found = (
        evaluate(
            kind(model, tokenizer=tokenizer),
            folder,
            tasks=["animals_choice", "animals_answer"],
            apply_chat_template=True,
            system_instruction="Answer.",
            limit=4,
        )
        for kind in (HFLM, PrefixHFLM)
    )
    assert "[system]Answer." in found["samples"]["animals_choice"][0]["arguments"][0][0]
    assert_same_results(found, expected)


@pytest.mark.parametrize("max_length", [24, 60])
def test_contexts_that_are_too_long_are_cut_as_the_harness_does(folder, max_length):
    options = {"tasks": ["animals_choice", "animals_text"], "model_args": {"max_length": max_length}, "limit": 5}
    assert_same_results(evaluate(MODEL_NAME, folder, **options), evaluate("hf", folder, **options))


def test_arguments_of_our_own_arrive(folder):
    options = {"tasks": ["animals_choice"], "limit": 3}
    found = evaluate(MODEL_NAME, folder, model_args={"max_batch_tokens": 7, "self_check": False}, **options)
    assert_same_results(found, evaluate("hf", folder, **options))


def test_mixed_precision_applies(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = pairs(("Which animal purrs?", " a cat"), ("Which animal purrs?", " an owl"))
    plain, expected, found = (
        lm.loglikelihood(asked, disable_tqdm=True)
        for lm in (
            HFLM(model, tokenizer=tokenizer),
            HFLM(model, tokenizer=tokenizer, mixed_precision_dtype="bfloat16", softmax_dtype="float32"),
            PrefixHFLM(model, tokenizer=tokenizer, mixed_precision_dtype="bfloat16"),
        )
    )
    rounding = max(abs(a[0] - b[0]) for a, b in zip(plain, expected, strict=True))
    assert rounding > 1e-3
    for (logprob, _), (exact, _), (ours, _) in zip(expected, plain, found, strict=True):
        assert abs(ours - exact) > 1e-4
        assert abs(ours - logprob) < 3 * rounding


def test_pairs_that_stop_the_harness_have_a_score_and_others_have_the_harness(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    lm, plain = PrefixHFLM(model, tokenizer=tokenizer), HFLM(model, tokenizer=tokenizer)
    known = pairs(("", "a cat"), ("", "<|end|>a cat"), ("a cat  ", "purrs"), ("A hen", " lays eggs"))
    assert_same_answers(lm.loglikelihood(known, disable_tqdm=True), plain.loglikelihood(known, disable_tqdm=True))

    merging, empty, blank = ("Which an", "imal"), ("a cat", ""), ("  ", "a cat")
    whole = tokenizer("Which animal").input_ids
    assert len(whole) == len(tokenizer("Which an").input_ids) == 2  # the continuation has no token of its own
    for pair in (merging, empty, blank):
        with pytest.raises((AssertionError, IndexError)):
            plain.loglikelihood(pairs(pair), disable_tqdm=True)
    merged_answer, empty_answer, blank_answer = lm.loglikelihood(pairs(merging, empty, blank), disable_tqdm=True)
    spaced = tokenizer("  a cat").input_ids
    assert empty_answer == (0.0, True)
    assert_same_answers([merged_answer[0]], [plain_logprob(model, whole[:1], whole[1:])])
    assert_same_answers([blank_answer[0]], [plain_logprob(model, [tokenizer.eos_token_id], spaced)])


def test_a_response_cache_answers_without_the_model(folder, tmp_path):
    options = {"use_cache": str(tmp_path / "responses"), "limit": 3}
    first = evaluate(MODEL_NAME, folder, **options)
    second = evaluate(MODEL_NAME, folder, **options)
    assert first["config"]["prefix_report"]["total"]["requests"] > 0
    assert second["config"]["prefix_report"]["total"]["requests"] == 0
    assert_same_results(second, first)


def test_the_batch_size_is_searched_once_and_for_generation_only(folder, monkeypatch):
    searched = []
    monkeypatch.setattr(HFLM, "_detect_batch_size", lambda self, *args: searched.append(1) or 4)
    found = evaluate(MODEL_NAME, folder, batch_size="auto")
    assert len(searched) == 1
    assert_same_results(found, evaluate("hf", folder))


def test_thinking_models_are_refused_as_the_harness_does(folder, tokenizer):
    lm = PrefixHFLM(
        AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=tokenizer,
        enable_thinking=True,
        think_end_token="</think>",
    )
    if hasattr(lm, "enable_thinking"):  # older releases of the harness do not look
        with pytest.raises(ValueError, match="enable_thinking"):
            lm.loglikelihood(pairs(("a", " cat")))


def test_a_cache_that_the_task_names_is_left_to_it(folder, tokenizer):
    lm = PrefixHFLM(AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
    options = {"until": ["\n"], "max_gen_toks": 4}
    own = Instance("generate_until", {}, ("A hen", options), 0, ("own", 0, 1))
    options = {**options, "cache_implementation": "dynamic"}
    named = Instance("generate_until", {}, ("A hen", options), 0, ("named", 0, 1))
    assert lm.generate_until([own], disable_tqdm=True) == lm.generate_until([named], disable_tqdm=True)
    assert [task.task for task in lm.prefix_report().tasks] == ["own"]


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
    for name in ("lm_eval.api.registry", "lm_eval.models.huggingface", "hf_prefix_cache.integrations.lm_eval"):
        monkeypatch.delitem(sys.modules, name)
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
