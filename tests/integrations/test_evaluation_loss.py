import gc
import weakref

import pytest
import torch
from labelled import assert_equals_trainer, ids, labelled, mixed_rows, pad, pad_left, with_lora
from torch.utils.data import IterableDataset
from transformers import MixtralConfig

from hf_prefix_cache.exceptions import (
    CacheCapacityError,
    InputMismatchError,
    InvalidTokensError,
    UnsupportedModelError,
)
from hf_prefix_cache.integrations.trainer import prefix_evaluation_loss
from hf_prefix_cache.scoring.tree_cache import TreeCache, TreeLayer
from tiny_models import DECODER, MAX_POSITIONS, TINY_MODELS, VOCAB_SIZE, build

# PEFT asks the model by a name that Transformers has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


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
