"""The data of the tasks beside this file; the harness calls these functions by their names in the YAML files."""

import csv
import json
import os
from pathlib import Path

from datasets import Dataset

HERE = Path(__file__).parent


def animals(**_):
    docs = [json.loads(line) for line in (HERE / "animals.jsonl").read_text().splitlines()]
    return {"test": Dataset.from_list(docs), "train": Dataset.from_list(docs[:3])}


def mmlu_anatomy(**_):
    return {"test": _mmlu("test"), "dev": _mmlu("dev")}


def arc_easy(**_):
    splits = {"test": "arc_easy_test.jsonl", "validation": "arc_easy_validation.jsonl"}
    return {
        split: Dataset.from_list([json.loads(line) for line in (_shared() / "arc" / name).read_text().splitlines()])
        for split, name in splits.items()
    }


def _mmlu(split):
    with (_shared() / "mmlu" / split / f"anatomy_{split}.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    return Dataset.from_list(
        [{"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5])} for row in rows]
    )


def _shared():
    return Path(os.environ["HF_PREFIX_CACHE_DATA"])
