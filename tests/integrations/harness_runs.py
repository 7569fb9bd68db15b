"""Running the harness on the local tasks, and comparing what two models answered."""

from pathlib import Path
from unittest import mock

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "local_tasks"
ALL_TASKS = ("animals_choice", "animals_letter", "animals_text", "animals_answer")


def evaluate(model, folder, *, tasks=ALL_TASKS, model_args=None, batch_size=4, **options):
    if isinstance(model, str):
        options["model_args"] = {"pretrained": str(folder), "dtype": "float32", **(model_args or {})}
    # The harness would list all packages of the machine, which takes seconds.
    with mock.patch("lm_eval.evaluator.add_env_info"):
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
