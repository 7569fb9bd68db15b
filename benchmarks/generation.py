"""Generating on a shared prefix: against Transformers' own caches, in the same run.

Contenders take turns step by step, so that whatever else the machine does hits all of them; medians count. Each
measurement is written to the results file as soon as it is made and not made again, so the script can be stopped and
started. What needs more memory than --memory-limit is recorded as not run, with what it would have needed.

parts: grid       rows on one prefix, against DynamicCache after batch_repeat_interleave: tokens/s and cache memory;
                  each point in a process of its own, as a user's first call is
       rounding   how far logits in a half-precision dtype are from float32's, with either cache
       crossover  from how many shared tokens on shared-prefix attention pays: what `attention/gate.py` is set from
       one_row    decoding of a single row, beside the time that reading its bytes takes at the measured bandwidth
       first      time to first token of a short question behind a known prefix, against an uncached call
       static     compiled decoding through 20 prefixes: compilations counted, speed against Transformers' static cache
       kvboost    the same questions behind a known prefix, one at a time and 8 at once, through KVBoost
       kept       the main point of the grid where the C library keeps freed memory: a baseline that copies its cache
                  at every step then takes no page faults. It holds for the rest of the process, so it comes last

usage: python benchmarks/generation.py [--parts grid one_row] [--dtype float32] [--note "other work on the other core"]
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import CompileConfig, DynamicCache

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.packaged_model import load_model

RESULTS = Path(__file__).parent / "results"
PARTS = ("grid", "rounding", "crossover", "one_row", "first", "static", "kvboost", "kept")
PREFIXES, ROWS = (512, 2048, 6000), (4, 16, 64)
MAIN = 16, 2048  # measured over 64 new tokens; where a baseline's step takes seconds, over fewer
STATIC_PREFIXES, STATIC_LENGTHS, STATIC_QUESTIONS, STATIC_NEW = 20, (640, 2048), (1, 300), (8, 128)


class Record:
    """The results file: every measurement under a key, written at once, beside what other runs have written."""

    def __init__(self, path):
        self.path = path
        self.values = self.read()

    def read(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def once(self, part, key, make):
        """Return what is recorded under ``key``, or make and record it."""
        if key not in self.values.get(part, {}):
            entry = {**make(), "clock": clock}
            print(part, key, json.dumps({name: shorter(value) for name, value in entry.items()}), flush=True)
            self.values = {**self.read(), "setting": self.values.get("setting", {})}
            self.values.setdefault(part, {})[key] = entry
            self.save()
        return self.values[part][key]

    def save(self):
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n")
        partial.replace(self.path)


def shorter(value):
    """Return ``value`` with its numbers rounded, for a line on the screen."""
    if isinstance(value, dict):
        return {name: shorter(entry) for name, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def hardware(device, note=""):
    """Return what this runs on, in words."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        threads = torch.get_num_threads()
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPU cores"
        name = f"{cores}, {'one thread' if threads == 1 else f'{threads} threads'}"
    return ", ".join(filter(None, (platform.machine(), name, note)))


def random_tokens(model, *shape):
    return torch.randint(10, model.config.vocab_size - 100, shape, device=model.device)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock, now = "wall", CLOCKS["wall"]


def set_clock(name):
    """Measure by the clock on the wall, or by the process' own CPU time, on a core that others use too."""
    global clock, now
    clock, now = name, CLOCKS[name]


def timed(model, call):
    """Return the seconds that ``call`` takes and what it returns."""
    start = now()
    result = call()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return now() - start, result


def held_bytes(cache):
    return hpc.total_nbytes([cache])


# -- steps of many rows, and of one -----------------------------------------------------------------------------------


class Prefixes:
    """Prefixes by length, each computed once with the cache of either side."""

    def __init__(self, model):
        self.model, self.held, self.tokens = model, {}, None

    def __getitem__(self, length):
        if length not in self.held:
            base = hpc.PrefixDynamicCache(config=self.model.config)
            self.tokens = random_tokens(self.model, 1, length)
            for chunk in self.tokens.split(1024, dim=1):
                self.model(chunk, logits_to_keep=1, **cache_argument(base))
            self.held = {length: base}  # one at a time: long ones are large
        return self.held[length]

    def plain(self, length, rows):
        """Return the prefix in Transformers' cache, repeated for ``rows`` rows."""
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(self[length].layers):
            cache.update(layer.keys.clone(), layer.values.clone(), index)
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache


def take_turns(model, caches, tokens):
    """Feed ``tokens`` ``[rows, steps]`` to every cache, one column at a time in turn.

    Returns:
        Seconds of every step by name, without the first one, which warms up; the pages that the system had to hand
        out in each; and the last logits.
    """
    seconds, faults, logits = {name: [] for name in caches}, {name: [] for name in caches}, {}
    with ExitStack() as stack:
        for name, cache in caches.items():
            if name == "shared":
                stack.enter_context(cache.attend_shared())
        for step, column in enumerate(tokens.split(1, dim=1)):
            names = list(caches) if step % 2 else list(caches)[::-1]
            for name in names:
                call = partial(model, column, **cache_argument(caches[name]))
                before = page_faults()
                taken, output = timed(model, call)
                logits[name] = output.logits
                if step:
                    seconds[name].append(taken)
                    faults[name].append(page_faults() - before)
    return seconds, faults, logits


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def compare(model, prefixes, length, rows, steps, names):
    """Return medians of the contenders ``names`` for ``rows`` rows on a prefix of ``length`` tokens."""
    caches = {}
    for name in names:
        if name == "dynamic_cache":
            caches[name] = prefixes.plain(length, rows)
        else:
            caches[name] = prefixes[length].fork(batch_size=rows)
            if name == "unshared":
                caches[name].unshare()
    seconds, faults, logits = take_turns(model, caches, random_tokens(model, rows, steps + 1))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    sizes = {name: held_bytes(cache) for name, cache in caches.items()}
    point = {
        "prefix": length,
        "rows": rows,
        "steps": steps,
        "seconds_per_step": medians,
        "tokens_per_second": {name: rows / value for name, value in medians.items()},
        "tokens_per_second_of_all_steps": {name: rows * steps / sum(values) for name, values in seconds.items()},
        "page_faults_per_step": {name: statistics.median(values) for name, values in faults.items()},
        "cache_bytes": sizes,
    }
    if "dynamic_cache" in names:
        others = [name for name in names if name != "dynamic_cache"]
        point["speedup"] = {name: medians["dynamic_cache"] / medians[name] for name in others}
        point["memory_ratio"] = {name: sizes["dynamic_cache"] / sizes[name] for name in others}
        # The prefix is stored beside the forks' own tokens, once for however many forks.
        deviation = {name: (logits[name] - logits["dynamic_cache"]).abs().max().item() for name in others}
        point["largest_difference_of_logits"] = deviation
    return point


def grid_steps(rows, length):
    if (rows, length) == MAIN:
        return 64
    return 24 if rows * length <= 40_000 else 8


def measure_grid(record, model, arguments):
    if len(arguments.rows) * len(arguments.prefixes) > 1:
        # A process of its own for each point: what the allocator keeps of earlier points changes how long copies take.
        for rows, length in itertools.product(arguments.rows, arguments.prefixes):
            point = ["--parts", "grid", "--rows", str(rows), "--prefixes", str(length)]
            subprocess.run([sys.executable, *sys.argv, *point], check=True)
        record.values = record.read()
        return
    (rows,), (length,) = arguments.rows, arguments.prefixes
    prefixes = Prefixes(model)
    token_bytes = held_bytes(prefixes[64]) / held_tokens(prefixes[64])
    needed = int(rows * length * token_bytes)
    fits = needed <= arguments.memory_limit * 1e9

    def make():
        names = ("dynamic_cache", "shared") if fits else ("shared",)
        point = compare(model, prefixes, length, rows, grid_steps(rows, length), names)
        if not fits:
            limit = f"{arguments.memory_limit} GB"
            point["not_run"] = {"dynamic_cache": f"it takes {needed / 1e9:.1f} GB, the limit here is {limit}"}
        return point

    record.once("grid", f"{rows} rows on {length}", make)


def measure_kept(record, model, _):
    def make():
        threshold, count = -1, -4  # of trimming, and of allocations outside the heap, as malloc.h numbers them
        library = ctypes.CDLL(None)
        library.mallopt(threshold, 2**31 - 1)
        library.mallopt(count, 0)
        rows, length = MAIN
        return compare(model, Prefixes(model), length, rows, grid_steps(rows, length), ("dynamic_cache", "shared"))

    record.once("kept", "{} rows on {}".format(*MAIN), make)


def measure_rounding(record, model, arguments):
    if model.dtype == torch.float32:
        return

    def make(rows=16, length=512, steps=24):
        exact = load_model(arguments.model, dtype=torch.float32)[0].to(model.device).eval()
        tokens = random_tokens(model, rows, steps + 1)
        prefixes = Prefixes(model)
        caches = {"dynamic_cache": prefixes.plain(length, rows), "shared": prefixes[length].fork(batch_size=rows)}
        *_, logits = take_turns(model, caches, tokens)
        prompts = torch.cat([prefixes.tokens.expand(rows, -1), tokens], dim=1)
        expected = exact(prompts, logits_to_keep=1).logits.log_softmax(-1)
        off = {name: (value.float().log_softmax(-1) - expected).abs() for name, value in logits.items()}
        return {
            "prefix": length,
            "rows": rows,
            "steps": steps,
            "largest_difference_of_log_probs": {name: value.max().item() for name, value in off.items()},
            "mean_difference_of_log_probs": {name: value.mean().item() for name, value in off.items()},
        }

    record.once("rounding", "16 rows on 512 against float32", make)


def held_tokens(cache):
    """Return the tokens that there is room for: of spare room too, as bytes are counted with it."""
    return cache.layers[0].tensors()[0].shape[-2]


def measure_crossover(record, model, _):
    prefixes = Prefixes(model)
    for length in (32, 64, 128, 256, 512, 1024):
        for rows in (2, 4, 8):

            def make(length=length, rows=rows):
                point = compare(model, prefixes, length, rows, 24, ("unshared", "shared"))
                times = point["seconds_per_step"]
                return {**point, "saved_tokens": (rows - 1) * length, "gain": times["unshared"] / times["shared"]}

            record.once("crossover", f"{rows} rows on {length}", make)


def bandwidth(model):
    """Return the bytes per second at which memory is read, measured on one large sum."""
    data = torch.ones(256 << 20, dtype=torch.float32, device=model.device)
    runs = [timed(model, lambda: data.sum().item())[0] for _ in range(6)]
    return data.nbytes / min(runs)


def measure_one_row(record, model, arguments):
    speed = record.once("one_row", "memory bandwidth", lambda: {"bytes_per_second": bandwidth(model)})
    weights = sum(parameter.nbytes for parameter in model.parameters())
    prefixes = Prefixes(model)
    for length in (64, *arguments.prefixes):

        def make(length=length):
            point = compare(model, prefixes, length, 1, 64, ("dynamic_cache", "unshared"))
            read = weights + point["cache_bytes"]["dynamic_cache"]
            limit = read / speed["bytes_per_second"]
            reached = limit / point["seconds_per_step"]["unshared"]
            return {**point, "bytes_read": read, "seconds_at_bandwidth": limit, "reached_of_bandwidth": reached}

        record.once("one_row", f"{length} tokens", make)


# -- time to first token ----------------------------------------------------------------------------------------------


def measure_first_token(record, model, arguments):
    prefix = random_tokens(model, 1, 2048)
    hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(prefix)
    names = {"uncached": {}, "prefix-dynamic": {"cache_implementation": "prefix-dynamic"}}
    names["prefix-static"] = {"cache_implementation": "prefix-static", "max_cache_len": 2304}
    names["static"] = {"cache_implementation": "static", "max_cache_len": 2304}
    names["question_alone"] = {}  # nothing before it: as fast as it could be if the prefix cost nothing

    def make():
        seconds = {name: [] for name in names}
        for repeat in range(arguments.repeats + 1):
            for name, options in names.items():
                prompt = random_tokens(model, 1, 32)  # a new question every time
                if name != "question_alone":
                    prompt = torch.cat([prefix, prompt], dim=1)
                call = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
                taken, _ = timed(model, lambda prompt=prompt, call=call: model.generate(prompt, **call))
                if repeat or name in ("uncached", "static"):
                    seconds[name].append(taken)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratios = {name: medians["uncached"] / value for name, value in medians.items() if name != "uncached"}
        return {"prefix": 2048, "question": 32, "seconds": medians, "speedup_over_uncached": ratios}

    record.once("first", "2048 known and 32 new tokens", make)


# -- static shapes ----------------------------------------------------------------------------------------------------


def compiling(backend):
    config = CompileConfig(fullgraph=False, dynamic=False, backend=backend, mode=None)
    config._compile_all_devices = True  # on the CPU too
    return config


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def static_calls(model):
    """Yield 20 prompts with prefixes of their own, and how many tokens each generates."""
    generator = torch.Generator().manual_seed(0)
    (short, long), (few, many) = STATIC_QUESTIONS, STATIC_NEW
    for index in range(STATIC_PREFIXES):
        question = short + (long - short) * index // (STATIC_PREFIXES - 1)
        new = few + int((many - few) * (7 * index % STATIC_PREFIXES / (STATIC_PREFIXES - 1)) ** 2)
        length = int(torch.randint(50, min(STATIC_LENGTHS) - question - new, (1,), generator=generator))
        yield random_tokens(model, 1, length), random_tokens(model, 1, question), new


class StepTimer:
    """A streamer that notes when each token comes."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(now())

    def end(self):
        pass

    def steps(self):
        """Return the seconds of the decode steps: not of the prompt, the prefill and the last, which ends."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]


def measure_static(record, model, arguments):
    for length in STATIC_LENGTHS:

        def make(length=length):
            config = compiling(arguments.backend)
            options = {"max_cache_len": length, "do_sample": False, "compile_config": config}
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            warming = {
                "prefix-static": lambda: hpc.warmup(
                    model, max_cache_len=length, compile_config=config, progress=False
                ),
                "static": lambda: model.generate(
                    random_tokens(model, 1, 20), max_new_tokens=4, cache_implementation="static", **options
                ),
            }
            warm = {}
            for name, call in warming.items():
                before = graphs()
                warm[name] = {"seconds": timed(model, call)[0], "graphs": graphs() - before}
            steps, later = {name: [] for name in warming}, dict.fromkeys(warming, 0)
            for index, (prefix, question, new) in enumerate(list(static_calls(model))[: arguments.calls]):
                hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(prefix)
                prompt = torch.cat([prefix, question], dim=1)
                for name in list(warming) if index % 2 else list(warming)[::-1]:
                    before, timer = graphs(), StepTimer()
                    model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=new,
                        eos_token_id=None,
                        pad_token_id=0,
                        cache_implementation=name,
                        streamer=timer,
                        **options,
                    )
                    steps[name] += timer.steps()
                    later[name] += graphs() - before
            medians = {name: statistics.median(values) for name, values in steps.items()}
            return {
                "max_cache_len": length,
                "prompt_lengths": STATIC_QUESTIONS,
                "new_tokens": STATIC_NEW,
                "warmup": warm,
                "graphs_after_warmup": later,
                "seconds_per_step": medians,
                "speedup": medians["static"] / medians["prefix-static"],
            }

        record.once("static", f"{arguments.backend}, {arguments.calls} prefixes, {length} tokens pinned", make)


# -- KVBoost ----------------------------------------------------------------------------------------------------------


def measure_kvboost(record, model, arguments):
    try:
        from kvboost import KVBoost
    except ImportError as error:
        print(f"kvboost: skipped, {error}; install it beside this package: pip install kvboost")
        return
    tokenizer = load_model(arguments.model)[1]
    sentences = [f"On day {day} the keeper of the lighthouse saw {day * 7 % 23} ships pass.\n" for day in range(110)]
    prefix = "".join(sentences)
    asked = [f"Question {number}: how many ships passed on day {number * 3}? Answer:" for number in range(60)]
    plain = {"do_sample": False, "pad_token_id": tokenizer.eos_token_id}

    def ours(prompts, new, name):
        options = {"cache_implementation": name} if name else {}
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(**inputs, **plain, max_new_tokens=new, **options)
        return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def theirs(prompts, new):
        if len(prompts) == 1:
            return [engine.generate(prompts[0], max_new_tokens=new).output_text]
        return [result.output_text for result in engine.generate_batch(prompts, max_new_tokens=new)]

    def make(rows, new):
        calls = {
            "uncached": lambda prompts: ours(prompts, new, None),
            "prefix-dynamic": lambda prompts: ours(prompts, new, "prefix-dynamic"),
            "kvboost": lambda prompts: theirs(prompts, new),
        }
        seconds, equal = {name: [] for name in calls}, dict.fromkeys(calls, 0)
        for repeat in range(arguments.repeats + 1):
            prompts = [prefix + question for question in asked[repeat * rows : (repeat + 1) * rows]]
            texts = {}
            for name, call in calls.items():
                taken, texts[name] = timed(model, partial(call, prompts))
                seconds[name] += [taken] if repeat else []  # the first warms up
            for name, answers in texts.items():
                equal[name] += sum(a == b for a, b in zip(answers, texts["uncached"], strict=True))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        answers = rows * (arguments.repeats + 1)
        shares = {name: count / answers for name, count in equal.items()}
        return {"prefix": len(tokenizer(prefix)["input_ids"]), "seconds": medians, "answers_as_uncached": shares}

    engine = KVBoost(model, tokenizer, max_cache_bytes=2 << 30, device=str(model.device))
    engine.warm(prefix)
    hpc.store_for(model).clear()
    hpc.PrefixCachedModel(model, tokenizer, strategy="prefix-dynamic").prefill(prefix)
    record.once("kvboost", "1 question, 1 new token", partial(make, 1, 1))
    record.once("kvboost", "1 question, 16 new tokens", partial(make, 1, 16))
    record.once("kvboost", "8 questions at once, 16 new tokens", partial(make, 8, 16))


# -- pictures ---------------------------------------------------------------------------------------------------------


def draw(record, path):
    """Plot tokens per second, what a row costs as rows grow, what unique tokens cost, and a single row's limit."""
    from matplotlib.figure import Figure

    points = list(record.values.get("grid", {}).values())
    if not points:
        return
    figure = Figure(figsize=(12, 9), layout="constrained")
    (speeds, costs), (unique, single) = figure.subplots(2, 2)
    colors = {length: f"C{index}" for index, length in enumerate(sorted({point["prefix"] for point in points}))}
    for length, color in colors.items():
        own = sorted((point for point in points if point["prefix"] == length), key=lambda point: point["rows"])
        for name, style in (("shared", "o-"), ("dynamic_cache", "s--")):
            known = [point for point in own if name in point["tokens_per_second"]]
            rows = [point["rows"] for point in known]
            label = f"{length} tokens, {'prefix-dynamic' if name == 'shared' else 'DynamicCache'}"
            speeds.plot(rows, [p["tokens_per_second"][name] for p in known], style, color=color, label=label)
            per_row = [1000 * p["seconds_per_step"][name] / p["rows"] for p in known]
            costs.plot(rows, per_row, style, color=color)
    for name, style in (("shared", "o"), ("dynamic_cache", "s")):
        known = [point for point in points if name in point["seconds_per_step"]]
        held = [(p["prefix"] * (1 if name == "shared" else p["rows"]) + p["rows"] * p["steps"]) for p in known]
        label = "prefix-dynamic" if name == "shared" else "DynamicCache"
        unique.plot(held, [p["seconds_per_step"][name] for p in known], style, label=label)
    for axes in (speeds, costs, unique):
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
    counts = sorted({point["rows"] for point in points})
    for axes in (speeds, costs):
        axes.set_xticks(counts, counts)
        axes.minorticks_off()
    speeds.set(xlabel="rows", ylabel="tokens per second", title="Rows on one prefix")
    speeds.legend(fontsize=7)
    costs.set(xlabel="rows", ylabel="milliseconds per row and step", title="What one more row costs")
    unique.set(xlabel="tokens in the cache", ylabel="seconds per step", title="What is stored once is read once")
    unique.legend()
    draw_one_row(record, single)
    setting = record.values["setting"]
    figure.suptitle(f"{setting['model']}, {setting['dtype']}, {setting['hardware']}", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_one_row(record, axes):
    """Plot a step of a single row beside the time that reading its bytes takes."""
    points = [point for point in record.values.get("one_row", {}).values() if "prefix" in point]
    points.sort(key=lambda point: point["prefix"])
    lengths = [point["prefix"] for point in points]
    for name, label, style in (("dynamic_cache", "DynamicCache", "s--"), ("unshared", "prefix-dynamic", "o-")):
        axes.plot(lengths, [1000 * p["seconds_per_step"][name] for p in points], style, label=label)
    limits = [1000 * point["seconds_at_bandwidth"] for point in points]
    axes.plot(lengths, limits, ":", color="grey", label="reading weights and cache at the measured bandwidth")
    axes.set(xlabel="tokens in the cache", ylabel="milliseconds per step", title="A single row", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def begin(kind, arguments):
    """Return the model and the results file of a benchmark with the arguments of these scripts."""
    set_clock(arguments.clock)
    model, _ = load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    model = model.to(arguments.device).eval()
    name = Path(arguments.model or "SmolLM2-135M-Instruct").name
    record = Record(RESULTS / f"{kind}-{arguments.device}-{name}-{arguments.dtype}.json")
    record.values["setting"] = {
        "hardware": hardware(arguments.device, arguments.note),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": name,
        "dtype": arguments.dtype,
    }
    print(record.values["setting"], flush=True)
    return model, record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--model", default=None, help="Hub id or folder; the packaged model by default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--prefixes", type=int, nargs="+", default=PREFIXES)
    parser.add_argument("--repeats", type=int, default=3, help="runs of whole calls")
    parser.add_argument("--memory-limit", type=float, default=8, help="gigabytes that a baseline's cache may take")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--calls", type=int, default=STATIC_PREFIXES, help="of the part static, each with a prefix")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: for one thread on a shared core")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    arguments = parser.parse_args()
    model, record = begin("generation", arguments)
    measures = {
        "grid": measure_grid,
        "rounding": measure_rounding,
        "crossover": measure_crossover,
        "one_row": measure_one_row,
        "first": measure_first_token,
        "static": measure_static,
        "kvboost": measure_kvboost,
        "kept": measure_kept,
    }
    for part in arguments.parts:
        with torch.inference_mode():
            measures[part](record, model, arguments)
    draw(record, record.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
