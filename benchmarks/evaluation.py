"""Evaluation while training, and whole harness tasks: against Trainer's own and lm-evaluation-harness' `hf`.

`loss` takes the evaluation loss of multiple-choice rows behind one few-shot preamble, on a LoRA model, by
`Trainer.evaluate` and by `prefix_evaluation_loss`. `harness` runs tasks over local files with the models `hf` and
`hf-prefix` and compares metrics and every sample's log-likelihoods. Each measurement is recorded at once and not made
again.

usage: python benchmarks/evaluation.py --data FOLDER [--parts loss harness] [--documents 40] [--limit 100]
"""

import argparse
import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch
import transformers

from hf_prefix_cache.packaged_model import load_model
from hf_prefix_cache.scoring import encode_pairs
from scoring import FILES, RESULTS, Record, read_requests, take, timed

TASKS = Path(__file__).parent.parent / "tests" / "integrations" / "local_tasks"
BATCH_SIZES = (1, 4, 8)


def labelled_rows(tokenizer, arguments):
    """Return the answers of a request file as labelled rows, without labels on the context."""
    requests = take(read_requests(arguments.data, FILES[2]), arguments.documents)
    pairs = encode_pairs(tokenizer, [(context, answer) for _, context, answer, _ in requests])
    return [
        {"input_ids": context + answer, "labels": [-100] * len(context) + answer}
        for context, answer in (map(list, pair) for pair in pairs)
    ]


def with_lora(model):
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=8))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def trainers_loss(model, tokenizer, rows, batch_size):
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=batch_size
        )
        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
        trainer = transformers.Trainer(model, arguments, eval_dataset=rows, data_collator=collator)
        seconds, metrics = timed(trainer.evaluate, "cpu")
        return {"seconds": seconds, "loss": metrics["eval_loss"]}


def measure_loss(record, tokenizer, model, arguments):
    from hf_prefix_cache.integrations.trainer import prefix_evaluation_loss

    rows = labelled_rows(tokenizer, arguments)
    group = f"evaluation loss, {arguments.documents} documents"
    model = with_lora(model)
    prefix_evaluation_loss(model, rows[:2])  # warms up and runs the self-check

    def ours(batch_size):
        runs = [
            timed(lambda: prefix_evaluation_loss(model, rows, per_device_eval_batch_size=batch_size), "cpu")
            for _ in range(3)
        ]
        result = runs[0][1]
        return {
            "seconds": statistics.median(seconds for seconds, _ in runs),
            "loss": result.loss,
            "token_ratio": result.report.requested_tokens / result.report.computed_tokens,
        }

    best = None
    for batch_size in BATCH_SIZES:
        theirs = record.once(
            (group, "trainer", str(batch_size)), lambda size=batch_size: trainers_loss(model, tokenizer, rows, size)
        )
        mine = record.once((group, "ours", str(batch_size)), lambda size=batch_size: ours(size))
        print(f"batch {batch_size}: Trainer {theirs['seconds']:.1f} s, ours {mine['seconds']:.1f} s", flush=True)
        print(f"  losses differ by {abs(theirs['loss'] - mine['loss']):.1e}", flush=True)
        best = min(best or theirs["seconds"], theirs["seconds"])
    speedup = best / mine["seconds"]
    record.values[group]["summary"] = {
        "speedup_over_trainers_best_batch": speedup,
        "token_ratio": mine["token_ratio"],
        "reached_of_token_ratio": speedup / mine["token_ratio"],
    }
    record.save()
    print(record.values[group]["summary"], flush=True)


def measure_harness(record, tokenizer, model, arguments):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hf_prefix_cache.integrations.lm_eval import PrefixHFLM

    os.environ["HF_PREFIX_CACHE_DATA"] = str(arguments.data)  # read by the tasks

    def run(kind, task):
        lm = kind(model, tokenizer=tokenizer, batch_size=8)
        manager = TaskManager(include_path=str(TASKS))
        seconds, result = timed(
            lambda: lm_eval.simple_evaluate(
                lm, tasks=[task], task_manager=manager, limit=arguments.limit, bootstrap_iters=0
            ),
            "cpu",
        )
        samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
        return {
            "seconds": seconds,
            "metrics": {name: value for name, value in result["results"][task].items() if isinstance(value, float)},
            "logprobs": [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]],
        }

    for task in ("mmlu_anatomy_local", "arc_easy_local"):
        group = f"harness {task}, limit {arguments.limit}"
        theirs = record.once((group, "hf"), lambda task=task: run(HFLM, task))
        mine = record.once((group, "hf-prefix"), lambda task=task: run(PrefixHFLM, task))
        differences = [abs(a - b) for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True)]
        record.values[group]["summary"] = {
            "speedup": theirs["seconds"] / mine["seconds"],
            "same_metrics": theirs["metrics"] == mine["metrics"],
            "largest_difference": max(differences),
            "samples": len(differences),
        }
        record.save()
        print(group, record.values[group]["summary"], mine["metrics"], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HF_PREFIX_CACHE_DATA"), required=False)
    parser.add_argument("--parts", nargs="+", default=["loss", "harness"], choices=["loss", "harness"])
    parser.add_argument("--documents", type=int, default=40, help="documents of the evaluation loss")
    parser.add_argument("--limit", type=int, default=None, help="documents of each harness task; all by default")
    arguments = parser.parse_args()
    if arguments.data is None or not Path(arguments.data).is_dir():
        parser.exit(1, f"skipped: no request files at {arguments.data}; pass --data or set HF_PREFIX_CACHE_DATA\n")
    record = Record(RESULTS / "evaluation-cpu-packaged-float32.json")
    record.values["setting"] = {
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for part in arguments.parts:
        model, tokenizer = load_model(None, dtype=torch.float32)
        measure = {"loss": measure_loss, "harness": measure_harness}[part]
        measure(record, tokenizer, model.eval(), arguments)


if __name__ == "__main__":
    main()
