import pytest
import torch
from labelled import (
    CHECKPOINTING,
    arguments,
    assert_equals_trainer,
    ids,
    labelled,
    mixed_rows,
    pad,
    trainer_for,
    with_lora,
)
from transformers import Trainer

from hf_prefix_cache.exceptions import InputMismatchError, RequestError
from hf_prefix_cache.integrations.trainer import PrefixEvalCallback, Question
from hf_prefix_cache.scoring import loglikelihood
from tiny_models import VOCAB_SIZE

# PEFT asks the model by a name that Transformers has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_is_the_trainers_before_during_and_after_lora_training(tiny_model, tmp_path, checkpointing):
    rows = mixed_rows()
    model = with_lora(tiny_model("llama"))
    trainer = trainer_for(
        model,
        tmp_path,
        rows,
        callbacks=[PrefixEvalCallback(dataset=rows)],
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        max_steps=6,
        learning_rate=0.05,
        **{CHECKPOINTING: checkpointing},
    )
    trainer.train()
    trainer.evaluate()
    expected = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    found = [entry["eval_prefix_loss"] for entry in trainer.state.log_history if "eval_prefix_loss" in entry]
    assert len(expected) == 5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert len({round(loss, 3) for loss in found}) == 4  # nothing of an earlier step was taken
    assert_equals_trainer(model, tmp_path, rows)
    with model.disable_adapter():
        without = assert_equals_trainer(model, tmp_path, rows)
    torch.testing.assert_close(without.loss, found[0], atol=1e-5, rtol=0)
    merged = assert_equals_trainer(model.merge_and_unload(), tmp_path, rows)
    torch.testing.assert_close(merged.loss, found[-1], atol=1e-4, rtol=0)


def multiple_choice(questions=3, choices=4):
    preamble, requests, asked = ids(20), [], []
    for _ in range(questions):
        context = preamble + ids(5)
        asked.append(Question(range(len(requests), len(requests) + choices), answer=1))
        requests += [(context, ids(2)) for _ in range(choices)]
    return requests, asked


def test_the_callback_scores_requests_with_the_weights_of_the_moment(tiny_model, tmp_path):
    requests, questions = multiple_choice()
    model, rows = with_lora(tiny_model("llama")), mixed_rows()
    callback = PrefixEvalCallback(requests, rows, questions=questions)
    trainer = trainer_for(model, tmp_path, rows, learning_rate=0.05, max_steps=3, callbacks=[callback])
    for _ in range(2):
        metrics = trainer.evaluate()
        scores = loglikelihood(model, requests, progress=False)
        torch.testing.assert_close(
            [score.logprob for score in callback.scores], [score.logprob for score in scores], atol=1e-4, rtol=0
        )
        mean = sum(score.logprob for score in scores) / len(scores)
        torch.testing.assert_close(metrics["eval_prefix_logprob"], mean, atol=1e-4, rtol=0)
        best = [max(choices, key=lambda choice: scores[choice].logprob) for choices, _ in questions]
        right = [place == choices[answer] for place, (choices, answer) in zip(best, questions, strict=True)]
        assert metrics["eval_prefix_accuracy"] == pytest.approx(sum(right) / 3)
        torch.testing.assert_close(metrics["eval_prefix_loss"], metrics["eval_loss"], atol=1e-5, rtol=0)
        trainer.train()


def test_requests_and_data_set_share_one_tree(tiny_model, tmp_path):
    preamble = ids(40)
    rows = [labelled(preamble + ids(2), ids(2)) for _ in range(4)]
    requests = [(preamble + ids(2), ids(2)) for _ in range(4)]
    model = tiny_model("llama")
    callback = PrefixEvalCallback(requests, rows, self_check=False)
    trainer = trainer_for(model, tmp_path, rows, callbacks=[callback])
    metrics = trainer.evaluate()
    assert metrics["eval_prefix_computed_tokens"] <= 40 + 8 * 3
    assert metrics["eval_prefix_computed_tokens"] + metrics["eval_prefix_reused_tokens"] == 8 * 43


def test_the_trainer_logs_the_results_to_all_it_reports_to(tiny_model, tmp_path):
    rows = mixed_rows()
    trainer = trainer_for(tiny_model("llama"), tmp_path, rows)
    logged = []
    trainer.log = logged.append
    trainer.add_callback(PrefixEvalCallback(dataset=rows, prefix="eval_mine", trainer=trainer))
    trainer.evaluate()
    assert [next(iter(entry)) for entry in logged] == ["eval_loss", "eval_mine_loss"]


def test_the_best_model_can_be_chosen_by_a_result(tiny_model, tmp_path):
    rows = mixed_rows()
    trainer = trainer_for(
        with_lora(tiny_model("llama")),
        tmp_path,
        rows,
        callbacks=[PrefixEvalCallback(dataset=rows)],
        max_steps=2,
        learning_rate=0.02,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_prefix_loss",
        greater_is_better=False,
    )
    trainer.train()
    losses = [entry["eval_prefix_loss"] for entry in trainer.state.log_history if "eval_prefix_loss" in entry]
    assert trainer.state.best_metric == min(losses)


def test_several_data_sets_of_the_trainer_cost_one_evaluation_a_step(tiny_model, tmp_path):
    rows = mixed_rows()
    model = tiny_model("llama")
    trainer = Trainer(
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=2, learning_rate=0.02),
        train_dataset=rows,
        eval_dataset={"first": rows[:4], "second": rows[4:8]},
        data_collator=pad,
        callbacks=[PrefixEvalCallback(multiple_choice()[0])],
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_prefix_logprob" in entry]
    assert [entry["step"] for entry in entries] == [1, 1, 2, 2]
    assert entries[0]["eval_prefix_runtime"] == entries[1]["eval_prefix_runtime"]
    assert entries[1]["eval_prefix_logprob"] != entries[2]["eval_prefix_logprob"]
    # Outside training nothing says that the weights are still the same.
    torch.nn.init.zeros_(model.lm_head.weight)
    assert trainer.evaluate()["eval_prefix_logprob"] == pytest.approx(-2 * torch.tensor(VOCAB_SIZE).log().item())


def test_mixed_precision_is_evaluated_in_it(tiny_model, tmp_path):
    rows = mixed_rows()
    model = with_lora(tiny_model("llama"))
    trainer = trainer_for(
        model,
        tmp_path,
        rows,
        bf16=True,
        callbacks=[PrefixEvalCallback(dataset=rows)],
        max_steps=1,
        eval_strategy="epoch",
    )
    trainer.train()
    metrics = trainer.evaluate()
    torch.testing.assert_close(metrics["eval_prefix_loss"], metrics["eval_loss"], atol=0.05, rtol=0)
    assert metrics["eval_prefix_reused_tokens"] > 0  # it was not sent to the plain route


def test_what_is_wrong_with_a_data_set_shows_before_training(tiny_model, tmp_path):
    rows = mixed_rows()
    callback = PrefixEvalCallback(dataset=[{"input_ids": [1, 2]}])
    trainer = trainer_for(tiny_model("llama"), tmp_path, rows, callbacks=[callback], max_steps=1)
    with pytest.raises(InputMismatchError, match="row 0 has no labels"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_callback_without_anything_to_score_is_refused():
    with pytest.raises(RequestError, match="nothing to score"):
        PrefixEvalCallback()
    for question in (Question((0, 1), 0), Question((0,), 1), Question((-1,), 0)):
        with pytest.raises(RequestError, match="question 0 is"):
            PrefixEvalCallback([([1], [2])], questions=[question])
