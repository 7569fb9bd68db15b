"""Labelled rows, a trainer on a tiny model, and its own loss as the oracle."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_prefix_cache.integrations.trainer import prefix_evaluation_loss
from tiny_models import VOCAB_SIZE

peft = pytest.importorskip("peft", reason="these tests train LoRA adapters: pip install peft")

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
