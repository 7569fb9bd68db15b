"""Scoring of real evaluation requests: ours against lm-evaluation-harness' HFLM and a copied cache, in the same run.

Each measurement is written to the results file as soon as it is made and not made again, so the script can be stopped
and started; baselines take hours. HFLM runs with its one-token grouping and the best batch size of 1, 4, 8, 16 and 32,
chosen on 15 documents. Times are from token ids to scores. The plot shows reached speed-up against the token ratio.

The requests are looked for in --data or the environment variable HF_PREFIX_CACHE_DATA: a folder with
oe_eval_requests/*.jsonl.gz, mmlu/test/anatomy_test.csv and gutenberg/*.txt. What is absent is skipped with a reason.

usage: python benchmarks/scoring.py --data FOLDER [--docs 100 | --full] [--dtype float32] [--sets NAME ...]
       python benchmarks/scoring.py --device cuda --random-llama 1b --dtype bfloat16 --data FOLDER
"""

import argparse
import copy
import csv
import gc
import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.packaged_model import load_model
from hf_prefix_cache.scoring import encode_pairs, last_scoring_report, loglikelihood, plan

RESULTS = Path(__file__).parent / "results"
FILES = (
    "arc_challenge_rc_5shot",
    "arc_easy_mc_5shot",
    "arc_easy_rc_5shot",
    "hellaswag_mc_5shot",
    "hellaswag_rc_5shot",
    "gsm8k_gold_bpb_5shot",
)
SETS = (*FILES, "mmlu_anatomy_0shot", "unrelated", "scaling_1x", "scaling_2x", "scaling_4x", "scaling_8x")
BATCH_SIZES = (1, 4, 8, 16, 32)
TRIAL_DOCS = 15
OURS = ("ours",)  # where our measurements are recorded
UNCONDITIONAL = 1_000_000  # document ids from here on are answers without their question
NOT_COMPARED = {
    "kvboost": "KVBoost 0.9.0 has generate, generate_batch, generate_many and warm, but no call that scores"
}
LLAMAS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}


# -- requests ---------------------------------------------------------------------------------------------------------


def read_requests(folder, name):
    """Return (document, context, continuation, is the right answer) for every request of a set."""
    if name in FILES:
        with gzip.open(folder / "oe_eval_requests" / f"{name}.jsonl.gz", "rt") as file:
            for line in map(json.loads, file):
                document = line["doc_id"]
                if isinstance(document, int) and document >= UNCONDITIONAL:
                    continue
                request = line["request"]
                yield document, request["context"], request["continuation"], line["idx"] == line.get("label")
    elif name == "mmlu_anatomy_0shot":
        with open(folder / "mmlu" / "test" / "anatomy_test.csv", newline="") as file:
            for document, row in enumerate(csv.DictReader(file)):
                choices = "\n".join(f"{letter}. {row[f'choice{place}']}" for place, letter in enumerate("ABCD"))
                header = "The following are multiple choice questions (with answers) about anatomy.\n\n"
                context = f"{header}{row['question']}\n{choices}\nAnswer:"
                for place, letter in enumerate("ABCD"):
                    yield document, context, f" {letter}", place == int(row["answer"])
    elif name == "unrelated":
        (book,) = sorted((folder / "gutenberg").glob("*.txt"))[:1]
        words = book.read_text(encoding="utf-8").split()
        for document in range(min(400, len(words) // 260)):
            # Lengths from 60 to 239 words, so that rows differ as those of real tasks do.
            start, length = 260 * document, 60 + 37 * document % 180
            passage = words[start : start + length]
            yield document, " ".join(passage[:-15]), " " + " ".join(passage[-15:]), True
    else:
        factor = int(name.removeprefix("scaling_").removesuffix("x"))
        documents = 8 * factor
        yield from take(read_requests(folder, FILES[0]), documents)


def take(requests, documents):
    """Return the requests of the first ``documents`` documents; all of them for None."""
    seen = set()
    for request in requests:
        if request[0] not in seen and documents is not None and len(seen) == documents:
            return
        seen.add(request[0])
        yield request


def accuracy(requests, logprobs):
    """Return how many documents have the highest log-probability at the right answer."""
    best = {}
    for (document, _, _, is_right), logprob in zip(requests, logprobs, strict=True):
        if document not in best or logprob > best[document][0]:
            best[document] = logprob, is_right
    return sum(is_right for _, is_right in best.values()) / len(best)


# -- contenders -------------------------------------------------------------------------------------------------------


def ours(model, pairs):
    return [score.logprob for score in loglikelihood(model, pairs, progress=False)]


def harness(model, tokenizer, pairs, batch_size):
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    requests = [(("", str(place)), *pair) for place, pair in enumerate(pairs)]
    return [logprob for logprob, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]


@torch.inference_mode()
def copied_cache(model, pairs, rows=8):
    """Do as the documentation's recipe: prefill what all share, copy the cache, repeat it, feed padded suffixes."""
    from transformers import DynamicCache

    lines = [context + rest[:-1] for context, rest in pairs]
    low, high = min(lines), max(lines)
    shortest = min(len(context) for context, _ in pairs) - 1
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), shortest)
    shared = min(shared, shortest)
    prefix = DynamicCache(config=model.config)
    if shared:
        model(torch.tensor([low[:shared]], device=model.device), logits_to_keep=1, **cache_argument(prefix))
    order = sorted(range(len(pairs)), key=lambda place: -len(lines[place]))
    logprobs = [0.0] * len(pairs)
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        width = len(lines[batch[0]]) - shared
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for row, place in enumerate(batch):
            ids[row, : len(lines[place]) - shared] = torch.tensor(lines[place][shared:])
        cache = copy.deepcopy(prefix)
        cache.batch_repeat_interleave(len(batch))
        logits = model(ids.to(model.device), **cache_argument(cache)).logits
        found = torch.log_softmax(logits, -1, dtype=torch.float32)
        for row, place in enumerate(batch):
            context, rest = pairs[place]
            first = len(context) - 1 - shared
            picked = found[row, first : first + len(rest)].gather(1, torch.tensor(rest, device=found.device)[:, None])
            logprobs[place] = picked.sum().item()
    return logprobs


def timed(call, device):
    gc.collect()
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


# -- measuring --------------------------------------------------------------------------------------------------------


class Record:
    """The results file: every measurement under a key, written at once."""

    def __init__(self, path):
        self.path = path
        self.values = json.loads(path.read_text()) if path.exists() else {}

    def once(self, key, make):
        """Return what is recorded under ``key``, or make and record it."""
        *groups, last = key
        place = self.values
        for group in groups:
            place = place.setdefault(group, {})
        if last not in place:
            place[last] = make()
            self.save()
        return place[last]

    def save(self):
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n")
        partial.replace(self.path)


def measure_in_turn(record, group, model, contenders, arguments):
    """Measure contenders in rounds, ours between all others, so that they meet the machine in the same moods."""
    own, *others = contenders
    turns = [own] + [turn for other in others for turn in (other, own)]
    for number in range(arguments.rounds):
        for path, call in turns:
            place = record.values.setdefault(group, {})
            for key in path:
                place = place.setdefault(key, {})
            if len(place.setdefault("seconds", [])) < (number + 1) * turns.count((path, call)):
                seconds, logprobs = timed(call, arguments.device)
                place["seconds"].append(seconds)
                place.setdefault("logprobs", logprobs)
                if path == OURS:
                    report = last_scoring_report(model)
                    place["route"], place["computed_tokens"] = report.route, report.computed_tokens
                    place["self_check"] = report.self_check.outcome
                record.save()


def against_float64(model, pairs, ours, theirs, arguments):
    """Return how far the scores that differ most between the two are from the plain model's in float64."""
    if arguments.device != "cpu" or arguments.dtype != "float32":
        return {}
    exact = copy.deepcopy(model).double()
    worst = sorted(range(len(pairs)), key=lambda place: -abs(ours[place] - theirs[place]))[:4]
    deviations = []
    for place in worst:
        context, rest = pairs[place]
        with torch.inference_mode():
            logits = exact(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1]
        score = torch.log_softmax(logits, -1).gather(1, torch.tensor(rest)[:, None]).sum().item()
        deviations.append((abs(ours[place] - score), abs(theirs[place] - score)))
    return {
        "largest_deviation_from_float64": max(own for own, _ in deviations),
        "largest_deviation_from_float64_hflm": max(other for _, other in deviations),
    }


def measure_set(record, name, model, tokenizer, arguments):
    """Measure one set of requests by every contender, and print the ratios."""
    documents = None if arguments.full or name.startswith("scaling") else arguments.docs
    requests = list(take(read_requests(arguments.data, name), documents))
    pairs = encode_pairs(tokenizer, [(context, rest) for _, context, rest, _ in requests])
    group = f"{name} {'all' if documents is None else documents} documents"
    sharing = plan(pairs)
    trial = list(take(read_requests(arguments.data, name), min(TRIAL_DOCS, documents or TRIAL_DOCS)))
    trial_pairs = encode_pairs(tokenizer, [(context, rest) for _, context, rest, _ in trial])
    loglikelihood(model, pairs[:2], progress=False)  # warms up and runs the self-check

    mine_call = (OURS, lambda: ours(model, pairs))
    if name.startswith("scaling"):
        measure_in_turn(record, group, model, [mine_call], arguments)
        mine = record.values[group]["ours"]
        seconds = statistics.median(mine["seconds"])
        record.values[group]["growth"] = {
            "requests": len(pairs),
            "grouped_tokens": sharing.grouped_tokens,
            "unique_tokens": sharing.unique_tokens,
            "seconds": seconds,
        }
        record.save()
        print(f"{group}: {len(pairs)} requests, {sharing.unique_tokens} distinct tokens, {seconds:.2f} s", flush=True)
        return
    tried = {}
    if arguments.device == "cuda":
        best = "auto"
    else:
        for size in BATCH_SIZES:
            tried[size] = record.once(
                (group, "hflm_trial_seconds", str(size)),
                lambda size=size: timed(lambda: harness(model, tokenizer, trial_pairs, size), arguments.device)[0],
            )
        best = min(tried, key=tried.get)
    contenders = [
        mine_call,
        (("hflm", str(best)), lambda: harness(model, tokenizer, pairs, best)),
        (("copied_cache",), lambda: copied_cache(model, pairs)),
    ]
    measure_in_turn(record, group, model, contenders, arguments)
    entry = record.values[group]
    mine, theirs, copied = entry["ours"], entry["hflm"][str(best)], entry["copied_cache"]
    speedup = statistics.median(theirs["seconds"]) / statistics.median(mine["seconds"])
    differences = [abs(a - b) for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True)]
    other = 1 if best == 8 else 8
    again = record.once((group, "hflm_logprobs", str(other)), lambda: harness(model, tokenizer, pairs, other))
    to_itself = [abs(a - b) for a, b in zip(again, theirs["logprobs"], strict=True)]
    summary = {
        "requests": len(pairs),
        "grouped_tokens": sharing.grouped_tokens,
        "unique_tokens": sharing.unique_tokens,
        "token_ratio": sharing.ideal_speedup,
        "hflm_batch_size": best,
        "speedup_over_hflm": speedup,
        "reached_of_token_ratio": speedup / sharing.ideal_speedup,
        "speedup_over_copied_cache": statistics.median(copied["seconds"]) / statistics.median(mine["seconds"]),
        "largest_difference": max(differences),
        "mean_difference": statistics.mean(differences),
        "largest_difference_of_hflm_between_batch_sizes": max(to_itself),
        **against_float64(model, pairs, mine["logprobs"], theirs["logprobs"], arguments),
        "accuracy": accuracy(requests, mine["logprobs"]),
        "accuracy_hflm": accuracy(requests, theirs["logprobs"]),
    }
    record.values[group]["summary"] = summary
    record.save()
    print(
        f"{group}: {speedup:.2f}x over HFLM (batch {best}), token ratio {sharing.ideal_speedup:.2f}, reached "
        f"{summary['reached_of_token_ratio']:.2f} of it, copied cache {summary['speedup_over_copied_cache']:.2f}x, "
        f"largest difference {max(differences):.1e}",
        flush=True,
    )


def measure_memory(record, arguments):
    """Measure each contender's peak memory in a process of its own."""
    for contender in ("ours", "hflm"):
        key = ("peak_memory_bytes", f"{FILES[0]} {arguments.docs} documents", contender)
        record.once(key, lambda contender=contender: run_child(contender, arguments))
    print("peak memory", record.values["peak_memory_bytes"])


def run_child(contender, arguments):
    command = [sys.executable, __file__, "--memory-of", contender, "--data", str(arguments.data)]
    command += ["--docs", str(arguments.docs), "--dtype", arguments.dtype, "--device", arguments.device]
    command += ["--model", arguments.model] if arguments.model else []
    command += ["--random-llama", arguments.random_llama] if arguments.random_llama else []
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def report_own_memory(model, tokenizer, arguments):
    requests = take(read_requests(arguments.data, FILES[0]), arguments.docs)
    pairs = encode_pairs(tokenizer, [(context, rest) for _, context, rest, _ in requests])
    if arguments.memory_of == "ours":
        ours(model, pairs)
    else:
        harness(model, tokenizer, pairs, 8)
    if arguments.device == "cuda":
        print(torch.cuda.max_memory_allocated())
    else:
        # Of this process alone; `getrusage` begins with what the parent had.
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        print(int(peak[1]) * 1024)


def draw(record, path):
    """Plot reached speed-up against the token ratio."""
    from matplotlib.figure import Figure

    points = {
        name.split()[0]: (entry["summary"]["token_ratio"], entry["summary"]["speedup_over_hflm"])
        for name, entry in record.values.items()
        if isinstance(entry, dict) and "summary" in entry
    }
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes, growth = figure.subplots(1, 2, width_ratios=[3, 2])
    most = max((max(point) for point in points.values()), default=1) * 1.3
    axes.plot([0.8, most], [0.8, most], color="grey", linewidth=1, label="token ratio")
    for name, (ideal, reached) in points.items():
        axes.scatter(ideal, reached, s=30)
        axes.annotate(name, (ideal, reached), xytext=(6, -4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="token ratio (HFLM's tokens / distinct tokens)")
    axes.set_ylabel("reached speed-up over HFLM")
    axes.set_title(f"{record.values['setting']['model']}, {record.values['setting']['dtype']}")
    axes.legend()
    entries = [entry["growth"] for entry in record.values.values() if isinstance(entry, dict) and "growth" in entry]
    growth.plot([e["unique_tokens"] for e in entries], [e["seconds"] for e in entries], marker="o")
    for entry in entries:
        label = f"{entry['requests']} requests,\n{entry['grouped_tokens']:,} tokens"
        growth.annotate(label, (entry["unique_tokens"], entry["seconds"]), xytext=(6, -14), textcoords="offset points")
    growth.set(xlabel="distinct tokens", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    growth.set_title("Cost under one root grows with distinct tokens")
    figure.savefig(path, dpi=150)


def load(arguments):
    model, tokenizer = load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    if arguments.random_llama:
        config = transformers.LlamaConfig(
            **LLAMAS[arguments.random_llama], num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192
        )
        with torch.device(arguments.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    return model.to(arguments.device).eval(), tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HF_PREFIX_CACHE_DATA"))
    parser.add_argument("--model", default=None, help="Hub id or folder; the packaged model by default")
    parser.add_argument("--random-llama", choices=sorted(LLAMAS), help="a randomly initialised Llama of this size")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--docs", type=int, default=100, help="documents of each set")
    parser.add_argument("--full", action="store_true", help="all documents")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS, metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each baseline; the median counts")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    parser.add_argument("--memory-of", choices=["ours", "hflm"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.data is None or not Path(arguments.data).is_dir():
        sys.exit(f"skipped: no request files at {arguments.data}; pass --data or set HF_PREFIX_CACHE_DATA")
    arguments.data = Path(arguments.data)
    model, tokenizer = load(arguments)
    if arguments.memory_of:
        report_own_memory(model, tokenizer, arguments)
        return
    name = f"llama-{arguments.random_llama}" if arguments.random_llama else Path(arguments.model or "packaged").name
    record = Record(RESULTS / f"scoring-{arguments.device}-{name}-{arguments.dtype}.json")
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    record.values["setting"] = {
        "hardware": ", ".join(filter(None, (platform.machine(), device, arguments.note))),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": name,
        "dtype": arguments.dtype,
        "not_compared": NOT_COMPARED,
    }
    print(record.values["setting"])
    for set_name in arguments.sets:
        try:
            measure_set(record, set_name, model, tokenizer, arguments)
        except FileNotFoundError as error:
            print(f"{set_name}: skipped, {error.filename} is absent")
    measure_memory(record, arguments)
    draw(record, record.path.with_suffix(".png"))
    reached = [
        entry["summary"]["reached_of_token_ratio"]
        for key, entry in record.values.items()
        if key.split()[0] in FILES and "summary" in entry
    ]
    if reached:
        print(f"geometric mean of reached over token ratio: {statistics.geometric_mean(reached):.3f}")


if __name__ == "__main__":
    main()
