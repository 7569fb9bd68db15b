import gc
import weakref

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import MixtralConfig, Trainer, TrainingArguments

from hf_prefix_cache.exceptions import (
    CacheCapacityError,
    InputMismatchError,
    InvalidTokensError,
    RequestError,
    UnsupportedModelError,
)
from hf_prefix_cache.integrations.trainer import PrefixEvalCallback, Question, prefix_evaluation_loss
from hf_prefix_cache.scoring import loglikelihood
from hf_prefix_cache.scoring.tree_cache import TreeCache, TreeLayer
from tiny_models import DECODER, MAX_POSITIONS, TINY_MODELS, VOCAB_SIZE, build

peft = pytest.importorskip("peft", reason="these tests train LoRA adapters: pip install peft")

# PEFT asks the model by a name that Transformers has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PAD = 0


def ids(count):
    return torch.randint(1, VOCAB_SIZE, (count,)).tolist()


def labelled(context, *parts):
    """Make a row of ``context`` without labels and of parts that have them and have none in turn."""
    row = {"input_ids": list(context), "labels": [-100] * len(context)}
    for place, part in enumerate(parts):
        row["input_ids"] += part
        row["labels"] += part if place % 2 == 0 else [-100] * len(part)
    return row


def mixed_rows():
    """Make rows that share several levels, nothing, everything, or have labels with holes, none, or everywhere."""
    preamble, passage = ids(30), ids(12)
    rows = [labelled(preamble + passage, ids(3)) for _ in range(5)]
    rows += [labelled(preamble + ids(4), ids(1 + n)) for n in range(4)]
    rows += [labelled(preamble, ids(2), ids(5), ids(3), ids(2)) for _ in range(3)]
    rows += [labelled(ids(9), ids(4)), labelled([], ids(11)), rows[0], labelled(preamble, passage)]
    first, *others = [rows[place] for place in torch.randperm(len(rows)).tolist()]
    # The row without labels never makes a batch alone: before 5.23 `Trainer` gives NaN then.
    return [first, labelled(ids(6)), *others]


def pad(features, side="right"):
    length = max(len(feature["input_ids"]) for feature in features)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        missing = length - len(feature["input_ids"])
        filled = {**feature, "attention_mask": [1] * len(feature["input_ids"])}
        for (name, rows), value in zip(batch.items(), (PAD, -100, 0), strict=True):
            gap = [value] * missing
            rows.append(filled[name] + gap if side == "right" else gap + filled[name])
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def pad_left(features):
    return pad(features, "left")


def arguments(folder, **options):
    defaults = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "optim": FUSED}
    return TrainingArguments(str(folder), **{**defaults, **options})


FUSED = "adamw_torch_fused"
# What Transformers called gradient checkpointing before 5.24.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


def trainer_for(model, folder, rows, *, data_collator=pad, callbacks=(), **options):
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=data_collator,
        callbacks=list(callbacks),
    )


def with_lora(model):
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def assert_equals_trainer(model, folder, rows, **options):
    expected = trainer_for(model, folder, rows, **options).evaluate()["eval_loss"]
    collator = options.get("data_collator")
    batch_size = options.get("per_device_eval_batch_size", 8)
    found = prefix_evaluation_loss(model, rows, data_collator=collator, per_device_eval_batch_size=batch_size)
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=0)
    return found


def count_tokens(model):
    """Count the tokens that are fed to ``model`` from now on."""
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: counts.append(inputs[0].numel()))
    return counts


def count_live_tensors():
    # By type, since some objects answer `isinstance` with a warning.
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_the_loss_is_the_trainers_at_every_batch_size(tiny_model, tmp_path, batch_size):
    rows = [row for row in mixed_rows() if batch_size > 1 or set(row["labels"]) != {-100}]
    assert_equals_trainer(tiny_model("llama"), tmp_path, rows, per_device_eval_batch_size=batch_size)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_the_loss_is_the_trainers_on_every_architecture(tiny_model, tmp_path, name):
    assert_equals_trainer(tiny_model(name), tmp_path, mixed_rows(), per_device_eval_batch_size=4)


@pytest.mark.parametrize("collator", [pad, pad_left])
def test_padding_by_the_collator_is_taken_off(tiny_model, tmp_path, collator):
    found = assert_equals_trainer(
        tiny_model("llama"), tmp_path, mixed_rows_without_first_label(), data_collator=collator
    )
    assert found.report.computed_tokens < found.report.requested_tokens


def mixed_rows_without_first_label():
    return [row for row in mixed_rows() if row["labels"][0] == -100]


def test_streams_and_columns_of_other_names_are_taken(tiny_model, tmp_path):
    class Stream(IterableDataset):
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

    class StreamWithLength(Stream):
        def __len__(self):
            return len(self.rows)

    rows = [{**row, "subject": "anatomy"} for row in mixed_rows()]
    for kind in (Stream, StreamWithLength):
        assert_equals_trainer(tiny_model("llama"), tmp_path, kind(rows), per_device_eval_batch_size=4, max_steps=1)


def test_a_map_style_data_set_is_read_by_its_length(tiny_model):
    rows = mixed_rows()

    class Wrapping:
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return rows[index % len(rows)]

    model = tiny_model("llama")
    assert prefix_evaluation_loss(model, Wrapping()).loss == prefix_evaluation_loss(model, rows).loss


def test_each_token_of_the_tree_is_computed_once(tiny_model):
    model, preamble = tiny_model("llama"), ids(60)
    rows = [labelled(preamble + ids(3), ids(2)) for _ in range(40)]
    counts = count_tokens(model)
    result = prefix_evaluation_loss(model, rows, self_check=False)
    total, unique = sum(len(row["input_ids"]) - 1 for row in rows), result.report.unique_tokens
    assert (result.report.requested_tokens, result.tokens, result.rows) == (total, 80, 40)
    assert sum(counts) <= total / (0.9 * total / unique)
    assert unique <= 60 + 40 * 4


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


def test_nothing_from_before_a_fused_step_is_used(tiny_model, tmp_path):
    model, rows = tiny_model("llama"), mixed_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = []
    for _ in range(3):
        losses.append(assert_equals_trainer(model, tmp_path, rows).loss)
        batch = pad(rows)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len({round(loss, 3) for loss in losses}) == 3


def test_every_modules_mode_is_put_back_also_after_an_error(tiny_model):
    model = with_lora(tiny_model("llama")).train()
    model.get_input_embeddings().eval()
    before = [module.training for module in model.modules()]
    prefix_evaluation_loss(model, mixed_rows())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(InvalidTokensError):
        prefix_evaluation_loss(model, [labelled([1], [VOCAB_SIZE])])
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_is_off_while_a_training_model_is_evaluated(tiny_model, tmp_path):
    model, rows = with_lora(tiny_model("llama")), mixed_rows()
    expected = assert_equals_trainer(model, tmp_path, rows).loss
    torch.testing.assert_close(prefix_evaluation_loss(model.train(), rows).loss, expected, atol=1e-6, rtol=0)


def test_everything_is_freed_when_an_evaluation_ends(tiny_model, monkeypatch):
    model, rows = with_lora(tiny_model("llama")), mixed_rows()
    made = []
    for kind in (TreeCache, TreeLayer):
        begin = kind.__init__

        def remember(self, *args, begin=begin, **kwargs):
            made.append(weakref.ref(self))
            begin(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", remember)
    prefix_evaluation_loss(model, rows)  # what is made once, such as a fingerprint, is made now
    gc.collect()
    gc.disable()  # so that a cycle, which would live into the next training step, shows
    try:
        before = count_live_tensors()
        prefix_evaluation_loss(model, rows)
        after = count_live_tensors()
    finally:
        gc.enable()
    assert len(made) > 2
    assert all(reference() is None for reference in made)
    assert after == before


def test_a_batch_without_labels_is_left_out(tiny_model):
    model = tiny_model("llama")
    rows, empty = [labelled(ids(9), ids(2)) for _ in range(4)], labelled(ids(9))
    expected = prefix_evaluation_loss(model, rows, per_device_eval_batch_size=2).loss
    with_empty = prefix_evaluation_loss(model, [*rows, empty, empty], per_device_eval_batch_size=2)
    assert with_empty.loss == expected
    assert (with_empty.rows, with_empty.tokens) == (6, 8)
    nothing = prefix_evaluation_loss(model, [empty])
    assert nothing.loss != nothing.loss
    assert nothing.tokens == 0


TOO_LONG = [1] * (MAX_POSITIONS + 1)


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (["text"], InputMismatchError, "row 1 is of type list"),
        ({"input_ids": [1, 2]}, InputMismatchError, "row 1 has no labels; pass the data_collator"),
        ({"labels": [1, 2]}, InputMismatchError, "row 1 has no input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, InputMismatchError, "row 1 has 2 input_ids but 1 labels"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, InputMismatchError, "label 3 for its token 1, which is 2"),
        ({"input_ids": [[1, 2]], "labels": [1, 2]}, InputMismatchError, "input_ids of row 1 .* shape \\[1, 2\\]"),
        ({"input_ids": [1.5, 2], "labels": [1, 2]}, InputMismatchError, "input_ids of row 1 are float64"),
        (
            {"input_ids": [1, 2, 0], "labels": [1, 2, 0], "attention_mask": [1, 1, 0]},
            InputMismatchError,
            "row 1 has labels where its attention_mask is 0",
        ),
        (
            {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "attention_mask": [1, 0, 1]},
            InputMismatchError,
            "row 1 has padding between its tokens",
        ),
        (
            {"input_ids": [0, 2, 3], "labels": [-100, 2, 3], "attention_mask": [0, 1, 1]},
            InputMismatchError,
            "row 1 is padded on the left and its first token has a label",
        ),
        (
            {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 1, 0]},
            InputMismatchError,
            "row 1 has position_ids that do not count",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, 2], "inputs_embeds": [[0.0], [0.0]]},
            InputMismatchError,
            "row 1 holds 'inputs_embeds'",
        ),
        (
            {"input_ids": [1, VOCAB_SIZE], "labels": [-100, VOCAB_SIZE]},
            InvalidTokensError,
            "request 1 holds the token",
        ),
        ({"input_ids": [*TOO_LONG, 1], "labels": [*TOO_LONG, 1]}, CacheCapacityError, "request 1 needs 257 tokens"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tiny_model, row, error, message):
    with pytest.raises(error, match=message):
        prefix_evaluation_loss(tiny_model("llama"), [labelled([1], [2]), row])


def test_an_empty_data_set_is_refused(tiny_model):
    with pytest.raises(InputMismatchError, match="has no rows"):
        prefix_evaluation_loss(tiny_model("llama"), [])
    with pytest.raises(InputMismatchError, match="per_device_eval_batch_size is 0"):
        prefix_evaluation_loss(tiny_model("llama"), [labelled([1], [2])], per_device_eval_batch_size=0)


def test_a_collator_that_packs_rows_into_one_is_refused(tiny_model):
    def flatten(features):
        return {name: [[token for row in features for token in row[name]]] for name in ("input_ids", "labels")}

    with pytest.raises(InputMismatchError, match="'input_ids' of 1 rows out of the 2 rows from 0 on"):
        prefix_evaluation_loss(tiny_model("llama"), [labelled([1], [2])] * 2, data_collator=flatten)


def test_left_padding_is_refused_where_it_moves_positions(tiny_model):
    rows = [labelled([5, 6], [7]), labelled([5, 6, 8], [9])]
    model = tiny_model("gpt2")
    with pytest.raises(InputMismatchError, match="row 0 is padded on the left, by which this model"):
        prefix_evaluation_loss(model, rows, data_collator=pad_left)

    def with_positions(features):
        batch = pad_left(features)
        return {**batch, "position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}

    expected = prefix_evaluation_loss(model, rows).loss
    found = prefix_evaluation_loss(model, rows, data_collator=with_positions).loss
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_loss_that_is_more_than_the_tokens_cross_entropy_is_refused(tiny_model):
    sizes = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
    experts = build(MixtralConfig(**sizes, output_router_logits=True))
    with pytest.raises(UnsupportedModelError, match="output_router_logits"):
        prefix_evaluation_loss(experts, [labelled([1], [2])])
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(UnsupportedModelError, match="a loss of its own"):
        prefix_evaluation_loss(model, [labelled([1], [2])])


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
