import json

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")

from harness_runs import ALL_TASKS, answers, assert_same_answers, assert_same_results, evaluate, pairs, plain_logprob
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from hf_prefix_cache.integrations.lm_eval import MODEL_NAME, PrefixHFLM, last_prefix_report


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


@pytest.mark.parametrize("model_args", [{"max_batch_tokens": 7, "self_check": False}, {"parallelize": True}])
def test_other_arguments_arrive(folder, model_args):
    options = {"tasks": ["animals_choice"], "limit": 3}
    found = evaluate(MODEL_NAME, folder, model_args=model_args, **options)
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
