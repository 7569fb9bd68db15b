"""Quantized and offloaded prefixes: bytes, perplexity behind them, error that does not accumulate, speed, memory.

A novel's first tokens are the prefix, computed exactly and then held by each contender; what follows is fed behind it.
Perplexity is measured with own tokens exact, as in generate, and for some formats with everything quantized.
Transformers' QuantizedCache with HQQ runs beside it. Offloading to a file runs in processes of its own, whose peak
resident memory is read beside that of the same model with one chunk of tokens.

Each part is written to the results file as soon as it is measured and not measured again, so the script can be stopped
and started.

The text is looked for in --data or the environment variable HF_PREFIX_CACHE_DATA: a folder with gutenberg/*.txt.

usage: python benchmarks/memory.py --data FOLDER [--prefix 4096] [--tokens 4000] [--dtype float32] [--model NAME]
"""

import argparse
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cached_property, partial
from pathlib import Path

import torch
import transformers
from transformers import QuantizedCache

import hf_prefix_cache as hpc
from hf_prefix_cache.cli.bench_memory import FORMATS
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.packaged_model import load_model

RESULTS = Path(__file__).parent / "results"
EVERYTHING = ("bitsandbytes, 8 bits", "bitsandbytes, nf4", "hqq, 4 bits")  # measured with own tokens quantized, too
THEIRS = "Transformers' QuantizedCache, hqq, 4 bits"
CHUNK = 500  # tokens fed at a time behind the prefix
GREEDY = 64  # tokens generated to count how many agree
APPENDED = 1000  # tokens appended one by one, to see whether error accumulates
SPEED_PREFIX = 2048
BUDGETS = 4  # times the memory budget that an offloaded prefix takes
OFFLOADED_CHUNK = 64  # tokens fed at a time where peak memory is read: what attention itself takes stays small


def feed(model, ids, cache, **options):
    return model(ids.to(model.device), **cache_argument(cache), **options).logits[0]


def relative(found, exact):
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def transformers_cache(model):
    """Return Transformers' own 4-bit cache, with groups along tokens' channels and the same residual as ours."""
    options = {"nbits": 4, "q_group_size": 64, "residual_length": 64, "axis_key": 1, "axis_value": 1}
    return QuantizedCache("hqq", model.config, **options)


class Record:
    """The results file: every measurement under a key, written at once."""

    def __init__(self, path):
        self.path = path
        self.values = json.loads(path.read_text()) if path.exists() else {}

    def once(self, group, key, make):
        """Return what is recorded of ``key``, or make and record it."""
        place = self.values.setdefault(group, {})
        if key not in place:
            place[key] = make()
            self.save()
            print(f"{group}, {key}: {json.dumps(place[key])}", flush=True)
        return place[key]

    def save(self):
        self.path.parent.mkdir(exist_ok=True)
        partial_file = self.path.with_suffix(".partial")
        partial_file.write_text(json.dumps(self.values, indent=1) + "\n")
        partial_file.replace(self.path)


class Text:
    """The text and what the exact model makes of it, computed when first asked for."""

    def __init__(self, model, ids, prefix_tokens):
        self.model, self.ids, self.prefix_tokens = model, ids, prefix_tokens

    @cached_property
    def exact(self):
        """An exact cache that holds the prefix, and the logits after it."""
        cache = hpc.PrefixDynamicCache(config=self.model.config)
        for chunk in self.ids[None, : self.prefix_tokens].split(1024, dim=1):
            logits = feed(self.model, chunk, cache, logits_to_keep=1)
        return cache, logits[-1]

    @cached_property
    def prefix(self):
        return self.exact[0].snapshot().compact()

    @cached_property
    def logits(self):
        """Logits ``[tokens, vocab]`` of the exact model for all that follows the prefix."""
        cache = self.exact[0].fork()
        return torch.cat([feed(self.model, chunk[None], cache) for chunk in self.following.split(CHUNK)])

    @property
    def following(self):
        return self.ids[self.prefix_tokens : -1]

    @cached_property
    def greedy(self):
        return greedy(self.model, self.exact[0].fork(), int(self.exact[1].argmax()))


def quantized(text, name, **options):
    return text.prefix.to_cache("prefix-quantized", **FORMATS[name], **options)


def sizes(text, name):
    hpc.PrefixQuantizedCache(config=text.model.config, **FORMATS[name])  # imports the package and tries it out
    prefix = text.prefix
    start = time.perf_counter()
    held = prefix.to_cache("prefix-quantized", **FORMATS[name])
    seconds = time.perf_counter() - start
    report = held.report()
    return {
        "bytes_of_exact": report.nbytes / prefix.nbytes,
        "bytes_per_token": report.bytes_per_token,
        "bits_per_value": report.bits_per_value,
        "error_of_keys": statistics.mean(report.error.keys),
        "error_of_values": statistics.mean(report.error.values),
        "seconds_to_quantize": seconds,
    }


def perplexity(text, cache):
    """Feed what follows the prefix behind ``cache`` (None: the exact one) and return what that loses."""
    loss = divergence = 0.0
    labels = text.ids[text.prefix_tokens + 1 :].to(text.model.device)
    for start in range(0, len(text.following), CHUNK):
        exact = text.logits[start : start + CHUNK].float().log_softmax(-1)
        wanted = labels[start : start + len(exact), None]
        ours = exact
        if cache is not None:
            ours = feed(text.model, text.following[None, start : start + CHUNK], cache).float().log_softmax(-1)
        loss -= float(ours.gather(1, wanted).sum())
        divergence += float((exact.exp() * (exact - ours)).sum())
    tokens = len(text.following)
    return {"perplexity": math.exp(loss / tokens), "divergence_per_token": divergence / tokens}


def greedy(model, cache, first):
    tokens = [first]
    while len(tokens) < GREEDY:
        tokens.append(int(feed(model, torch.tensor([[tokens[-1]]]), cache)[-1].argmax()))
    return tokens


def agreement(text, name):
    found = greedy(text.model, quantized(text, name, quantize_own=False), text.greedy[0])
    pairs = zip(found, text.greedy, strict=True)
    return next((place for place, (ours, exact) in enumerate(pairs) if ours != exact), GREEDY)


def held_by(layer):
    """Return the keys that attention sees of a layer of any contender."""
    if not hasattr(layer, "_quantized_keys"):
        return layer.keys
    held = layer._dequantize(layer._quantized_keys)
    return torch.cat([held, layer.keys], dim=-2) if layer.keys.ndim == 4 else held


def accumulation(text, name):
    """Return the relative error of keys: all tokens in one pass, and the last ones appended one by one."""
    exact = text.exact[0]
    layers = [0, len(exact.layers) // 2, len(exact.layers) - 1]
    found = []
    for appended in (0, min(APPENDED, text.prefix_tokens // 2)):
        cache = transformers_cache(text.model) if name == THEIRS else None
        cache = cache or hpc.PrefixQuantizedCache(config=text.model.config, **FORMATS[name])
        errors = []
        for index in layers:
            keys, values, layer = exact.layers[index].keys, exact.layers[index].values, cache.layers[index]
            at = keys.shape[-2] - appended
            layer.update(keys[:, :, :at].clone(), values[:, :, :at].clone())
            for place in range(at, keys.shape[-2]):
                layer.update(keys[:, :, place : place + 1].clone(), values[:, :, place : place + 1].clone())
            errors.append(relative(held_by(layer), keys))
        found.append(statistics.mean(errors))
    return {"one_pass": found[0], "appended": found[1]}


def speed(text, steps, repeats):
    """Return the median seconds of a decode step behind a prefix; contenders take turns, so that drift hits all."""
    exact = text.exact[0].fork()
    exact.crop_to(min(SPEED_PREFIX, text.prefix_tokens))
    prefix = exact.snapshot().compact()
    caches = {"exact": exact}
    for name in ("bitsandbytes, 8 bits", "bitsandbytes, nf4", "hqq, 4 bits"):
        caches[name] = prefix.to_cache("prefix-quantized", quantize_own=False, **FORMATS[name])
    caches[THEIRS] = theirs = transformers_cache(text.model)
    for index, layer in enumerate(exact.layers):
        theirs.update(layer.keys.clone(), layer.values.clone(), index)
    seconds = {name: [] for name in caches}
    for repeat in range(repeats + 1):
        for name, cache in caches.items():
            start = time.perf_counter()
            for _ in range(steps):
                feed(text.model, torch.tensor([[100]]), cache)
            if text.model.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in seconds.items()}


# -- offloading: a process of its own for each contender -------------------------------------------------------------


def peak_resident():
    """Return the most memory that this process has had resident, in bytes, and begin to count anew."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def report_offloading(model, ids, contender, prefix_tokens):
    """Print what a prefix takes in memory and time, held by one contender."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"offload_folder": folder} if contender == "file" else {}
        kind = hpc.PrefixDynamicCache if contender == "memory" else hpc.PrefixOffloadedCache

        def run(tokens, steps):
            cache = kind(config=model.config, **options)
            start = time.perf_counter()
            for chunk in ids[None, :tokens].split(OFFLOADED_CHUNK, dim=1):
                feed(model, chunk, cache, logits_to_keep=1)
            middle = time.perf_counter()
            token = ids[None, tokens : tokens + 1]
            for _ in range(steps):
                feed(model, token, cache)
            return middle - start, time.perf_counter() - middle, cache.nbytes

        run(OFFLOADED_CHUNK, 4)  # touches the weights and fills the allocator's pools
        peak_resident()
        run(OFFLOADED_CHUNK, 4)
        before = peak_resident()
        steps = 32
        prefill, decode, nbytes = run(prefix_tokens, steps)
        peak = peak_resident()
    result = {
        "prefix_tokens": prefix_tokens,
        "prefix_bytes": nbytes,
        "peak_resident_bytes_without_prefix": before,
        "peak_resident_bytes": peak,
        "prefix_bytes_resident_at_most": peak - before,
        "prefill_tokens_per_second": prefix_tokens / prefill,
        "seconds_per_decode_step": decode / steps,
    }
    print(json.dumps(result))


def offloading(contender, arguments):
    command = [sys.executable, __file__, "--offloading-of", contender, "--data", str(arguments.data)]
    command += ["--dtype", arguments.dtype, "--offloaded-prefix", str(arguments.offloaded_prefix)]
    command += ["--model", arguments.model] if arguments.model else []
    # Freed memory goes back to the system at once, so that what is counted is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


# -- all of it -------------------------------------------------------------------------------------------------------


def draw(record, path):
    """Plot what a prefix takes against what it loses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    exact = record.values["perplexity"]["exact"]["perplexity"]
    for place, (name, entry) in enumerate(record.values["formats"].items()):
        change = 100 * (record.values["perplexity"][f"{name}, own tokens exact"]["perplexity"] / exact - 1)
        axes.scatter(entry["bytes_of_exact"], change, s=40)
        offset = (6, 5 if place % 2 else -11)  # neighbours in the list are neighbours in the picture
        axes.annotate(name, (entry["bytes_of_exact"], change), xytext=offset, textcoords="offset points", fontsize=8)
    for bytes_of_exact, change in ((0.28, 0.2), (0.17, 0.5)):
        axes.plot([0, bytes_of_exact, bytes_of_exact], [change, change, -5], color="grey", linewidth=0.7, zorder=0)
    axes.axhline(0, color="black", linewidth=0.7)
    setting = record.values["setting"]
    axes.set_yscale("symlog", linthresh=0.5)
    axes.set(
        xlim=(0.05, 0.33),
        ylim=(-0.5, 40),
        xlabel=f"bytes of a {setting['prefix_tokens']:,}-token prefix / {setting['dtype']}'s",
    )
    axes.set_ylabel(f"change of perplexity, % ({setting['scored_tokens']:,} tokens)")
    axes.set_title(f"{setting['model']}, {setting['text']}; grey: goals of 4 and 8 bits", fontsize=9)
    figure.savefig(path, dpi=150)


def measure(record, text, arguments):
    for name in FORMATS:
        record.once("formats", name, partial(sizes, text, name))
    record.once("seconds_per_decode_step", f"behind {SPEED_PREFIX} tokens", partial(speed, text, 4, arguments.repeats))
    for name in (*FORMATS, THEIRS):
        record.once("error_of_keys", name, partial(accumulation, text, name))
    for name in FORMATS:
        record.once("greedy_tokens_that_agree", name, partial(agreement, text, name))
    record.once("perplexity", "exact", lambda: perplexity(text, None))
    for own in ("own tokens exact", "everything"):
        for name in FORMATS if own == "own tokens exact" else EVERYTHING:
            options = {"quantize_own": own == "everything"}
            record.once(
                "perplexity",
                f"{name}, {own}",
                lambda name=name, options=options: perplexity(text, quantized(text, name, **options)),
            )


def summarize(record):
    """Put what was asked for beside what was measured."""
    values = record.values
    exact = values["perplexity"]["exact"]["perplexity"]
    rows = {}
    for name in values["formats"]:
        after = values["perplexity"][f"{name}, own tokens exact"]["perplexity"]
        rows[name] = {
            "bytes_of_exact": values["formats"][name]["bytes_of_exact"],
            "perplexity_change_in_percent": 100 * (after / exact - 1),
        }
    steps = values["seconds_per_decode_step"][f"behind {SPEED_PREFIX} tokens"]
    held = values.get("offloading", {}).get("file")
    values["summary"] = {
        "formats": rows,
        "decode_speed_over_transformers": {name: steps[THEIRS] / value for name, value in steps.items()},
    }
    if held:
        budget = held["prefix_bytes"] / BUDGETS
        layer = held["prefix_bytes"] / values["setting"]["layers"]
        values["summary"]["offloading"] = {
            "budget_bytes": budget,
            "allowed_bytes": 1.1 * budget + layer,
            "resident_bytes_at_most": held["prefix_bytes_resident_at_most"],
        }
    record.save()
    print(json.dumps(values["summary"], indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HF_PREFIX_CACHE_DATA"))
    parser.add_argument("--model", help="a Hub id or folder; by default the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--hardware", help="what it runs on, in words")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens scored behind the prefix")
    parser.add_argument("--offloaded-prefix", type=int, default=4096)
    parser.add_argument("--skip", type=int, default=2000, help="characters skipped at the start of the text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--offloading-of", choices=["memory", "file"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    texts = sorted(Path(arguments.data).glob("gutenberg/*.txt")) if arguments.data else []
    if not texts:
        sys.exit(f"skipped: no gutenberg/*.txt at {arguments.data}; pass --data or set HF_PREFIX_CACHE_DATA")
    model, tokenizer = load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    model.to(arguments.device)
    tokens = max(arguments.prefix + arguments.tokens, arguments.offloaded_prefix) + 1
    ids = torch.tensor(tokenizer(texts[0].read_text()[arguments.skip :][: 8 * tokens]).input_ids)
    with torch.inference_mode():
        if arguments.offloading_of:
            report_offloading(model, ids, arguments.offloading_of, arguments.offloaded_prefix)
            return
        name = f"{arguments.device}-{Path(arguments.model or 'packaged').name}-{arguments.dtype}"
        record = Record(RESULTS / f"memory-{name}.json")
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
        record.values["setting"] = {
            "hardware": arguments.hardware or f"{platform.machine()}, {device}",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "bitsandbytes": importlib.import_module("bitsandbytes").__version__,
            "hqq": importlib.import_module("hqq").__version__,
            "model": arguments.model or "SmolLM2-135M-Instruct",
            "layers": model.config.num_hidden_layers,
            "text": texts[0].name,
            "dtype": arguments.dtype,
            "prefix_tokens": arguments.prefix,
            "scored_tokens": arguments.tokens,
        }
        if arguments.device == "cpu":
            for contender in ("memory", "file"):
                record.once("offloading", contender, partial(offloading, contender, arguments))
        measure(record, Text(model, ids[: arguments.prefix + arguments.tokens + 1], arguments.prefix), arguments)
    summarize(record)
    draw(record, record.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
