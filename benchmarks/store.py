"""The store and its files: finding, keeping, saving and loading prefixes, each beside what it is compared with.

Each measurement is written to the results file as soon as it is made and not made again, so the script can be stopped
and started. Finding is measured on made-up prefixes of as many layers as the packaged real model has, all else on the
model itself. Baselines are in the same run and take turns with what they are compared with.

usage: python benchmarks/store.py [--hardware TEXT] [--parts match overhead files memory fingerprint]
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.layers import AttentionState, KeyValues
from hf_prefix_cache.packaged_model import load_model

RESULTS = Path(__file__).parent / "results"
PARTS = ("match", "overhead", "files", "memory", "fingerprint")
ENTRIES = (100, 1_000, 10_000)
PROMPTS = (512, 1_024, 2_048, 4_096)
LAYERS = 30
DOCUMENTS, OWN = 32, 64  # prefixes continue one of these documents somewhere, with as many tokens of their own
PREFIX = 2_048


class Record:
    """The results file: every measurement under a key, written at once."""

    def __init__(self, path):
        self.path = path
        self.values = json.loads(path.read_text()) if path.exists() else {}

    def once(self, name, make):
        if name not in self.values:
            self.values[name] = make()
            self.save()
        print(f"{name}: {json.dumps(self.values[name])}", flush=True)
        return self.values[name]

    def save(self):
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n")
        partial.replace(self.path)


def timed(call, repeats):
    """Return the seconds of each run, after one that is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


# -- finding ----------------------------------------------------------------------------------------------------------


def made_up(tokens):
    """Return a snapshot of many layers and few bytes."""
    keys = torch.zeros(1, 1, len(tokens), 1)
    layer = AttentionState((KeyValues(keys, keys),), len(tokens))
    return hpc.PrefixSnapshot(
        layers=(layer,) * LAYERS,
        seq_length=len(tokens),
        batch_size=1,
        strategy="prefix-dynamic",
        config=transformers.LlamaConfig(vocab_size=50_000, num_hidden_layers=LAYERS),
        input_ids=torch.tensor([tokens]),
        fingerprint="model",
    )


def measure_match(entries):
    """Return the median milliseconds (of the processor: nothing is waited for) of a match, for each prompt length."""
    rng = random.Random(0)
    documents = [[rng.randrange(50_000) for _ in range(max(PROMPTS))] for _ in range(DOCUMENTS)]
    store = hpc.PrefixStore(max_bytes=10**10)
    for document in documents:
        store.insert(made_up(document))
    while len(store) < entries:
        cut = OWN * rng.randrange(1, max(PROMPTS) // OWN)
        store.insert(made_up(rng.choice(documents)[:cut] + [rng.randrange(50_000) for _ in range(OWN)]))
    found = {}
    for length in PROMPTS:
        seconds = []
        for index in range(200):
            prompt = torch.tensor([*documents[index % DOCUMENTS][: length - 1], 49_999])
            start = time.process_time()
            snapshot = store.match(prompt, "model")
            seconds.append(time.process_time() - start)
            if snapshot.seq_length < length - 1:
                raise SystemExit(f"found {snapshot.seq_length} of {length - 1} tokens")
        found[str(length)] = 1e3 * statistics.median(seconds)
    return found


# -- the real model ---------------------------------------------------------------------------------------------------


def prompt_of(length, seed, vocabulary):
    return torch.randint(1_000, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def measure_overhead(model, repeats):
    """Generate 64 tokens behind 512 that nobody has seen, without and with the prefix strategy, in turns."""
    vocabulary = model.config.vocab_size
    spent = {"fingerprint": 0.0, "match": 0.0, "insert": 0.0}
    store = hpc.store_for(model)
    seconds = {"plain": [], "prefix-dynamic": []}
    own = []
    for turn in range(repeats + 1):
        for name, options in (("plain", {}), ("prefix-dynamic", {"cache_implementation": "prefix-dynamic"})):
            prompt = prompt_of(512, turn, vocabulary)
            gc.collect()
            start = time.perf_counter()
            model.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, **options)
            if turn:
                seconds[name].append(time.perf_counter() - start)
        # What the strategy does beside computing, by itself: it hides in the noise of whole calls.
        missing = prompt_of(575, turn, vocabulary)[0].flip(0)
        cache = hpc.PrefixDynamicCache(config=model.config)
        store.clear()
        if turn == 0:
            with torch.no_grad():
                model(missing[None], logits_to_keep=1, **cache_argument(cache))
            kept = cache.snapshot(model=model, input_ids=missing[None])
            continue
        start = time.perf_counter()
        fingerprint = hpc.fingerprint_of(model)
        spent["fingerprint"] = time.perf_counter() - start
        start = time.perf_counter()
        store.match(missing, fingerprint)
        spent["match"] = time.perf_counter() - start
        start = time.perf_counter()
        store.insert(kept)
        spent["insert"] = time.perf_counter() - start
        own.append(sum(spent.values()))
    plain, ours = (statistics.median(seconds[name]) for name in seconds)
    pairs = [b / a - 1 for a, b in zip(seconds["plain"], seconds["prefix-dynamic"], strict=True)]
    return {
        "seconds": seconds,
        "plain_seconds": plain,
        "prefix_dynamic_seconds": ours,
        "overhead_of_medians": ours / plain - 1,
        "median_overhead_of_pairs": statistics.median(pairs),
        "own_work_seconds": statistics.median(own),
        "own_work_share": statistics.median(own) / plain,
        "last_own_work": spent,
    }


def read(tensors):
    """Read every byte: what is mapped is not there before."""
    return [tensor.view(-1).view(torch.uint8).view(torch.int64).sum() for tensor in tensors]


def copied(tensors):
    """Copy every byte, as a store does that keeps what was loaded."""
    return [tensor.clone() for tensor in tensors]


def measure_files(model, repeats):
    """Save and load a prefix of 2,048 tokens, and the same bytes with plain safetensors; and compute it again."""
    ids = prompt_of(PREFIX, 1, model.config.vocab_size)

    def compute():
        cache = hpc.PrefixDynamicCache(config=model.config)
        with torch.no_grad():
            logits = model(ids, logits_to_keep=1, **cache_argument(cache)).logits[:, -1]
        return cache.snapshot(model=model, input_ids=ids, next_logits=logits)

    computing = timed(compute, 3)
    snapshot = compute().compact()
    tensors = {str(index): tensor for index, tensor in enumerate(snapshot.tensors)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    names = ("save", "save_plain", "save_plain_unflushed", "load", "load_plain", "load_copied", "load_plain_copied")
    seconds = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        ours, plain = Path(folder) / "ours.safetensors", Path(folder) / "plain.safetensors"

        def save_plain(flush):
            save_file(tensors, plain)
            if flush:
                with open(plain, "rb+") as file:
                    os.fsync(file.fileno())

        turns = {
            "save": lambda: snapshot.save(ours),
            "save_plain": lambda: save_plain(True),
            "save_plain_unflushed": lambda: save_plain(False),
            # Loading reads every byte to check it; what plain safetensors maps is read afterwards.
            "load": lambda: hpc.PrefixSnapshot.load(ours, model=model),
            "load_plain": lambda: read(load_file(plain).values()),
            "load_copied": lambda: copied(hpc.PrefixSnapshot.load(ours, model=model).tensors),
            "load_plain_copied": lambda: copied(load_file(plain).values()),
        }
        for _ in range(repeats + 1):
            for name, call in turns.items():
                gc.collect()
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    found = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "bytes": nbytes,
        "seconds": {name: values[1:] for name, values in seconds.items()},
        **{f"{name}_gb_per_second": nbytes / value / 1e9 for name, value in found.items()},
        "save_over_plain": found["save_plain"] / found["save"],
        "save_over_plain_unflushed": found["save_plain_unflushed"] / found["save"],
        "load_over_plain": found["load_plain"] / found["load"],
        "load_copied_over_plain_copied": found["load_plain_copied"] / found["load_copied"],
        "computing_seconds": statistics.median(computing),
        "loading_seconds": found["load"],
        "loading_over_computing": statistics.median(computing) / found["load"],
    }


def measure_memory(model):
    """Keep prefixes of 1,024 tokens and more; compare what is held with the bytes of their keys and values."""
    found = {}
    for length in (1_024, 2_048):
        ids = prompt_of(length, 2, model.config.vocab_size)
        cache = hpc.PrefixDynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, logits_to_keep=1, **cache_argument(cache))
        snapshot = cache.snapshot(model=model, input_ids=ids)
        ideal = sum(
            part.numel() * part.element_size()
            for layer in snapshot.layers
            for segment in layer.segments
            for part in segment
        )
        store = hpc.PrefixStore(max_bytes=10**10)
        store.insert(snapshot)
        # Cut and joined again at odd places, as prompts that share less than all of it do.
        for cut in range(100, length, 171):
            store.insert(snapshot.crop_to(cut))
        tokens = 8 * length
        found[str(length)] = {
            "bytes_per_token": store.nbytes / length,
            "bytes_of_keys_and_values": ideal / length,
            "ratio": store.nbytes / ideal,
            "ratio_with_token_ids": (store.nbytes + tokens) / ideal,
        }
    return found


def measure_fingerprint(model):
    hpc.invalidate(model)
    start = time.perf_counter()
    hpc.fingerprint_of(model)
    first = time.perf_counter() - start
    again = []
    for _ in range(200):
        start = time.process_time()
        hpc.fingerprint_of(model)
        again.append(time.process_time() - start)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": len(list(model.parameters())) + len(list(model.buffers())),
        "first_seconds": first,
        "unchanged_processor_milliseconds": 1e3 * statistics.median(again),
    }


def draw(record, path):
    """Plot how finding grows, and files beside their baselines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for entries in ENTRIES:
        found = record.values.get(f"match in {entries} prefixes")
        if found:
            left.plot(
                [int(length) for length in found], list(found.values()), marker="o", label=f"{entries:,} prefixes"
            )
    left.axhline(1, color="grey", linewidth=1)
    left.set(xlabel="tokens of the prompt", ylabel="processor milliseconds of a match", ylim=(0, 1.2))
    left.legend()
    files = record.values.get("files")
    if files:
        names = ("save", "save_plain", "load", "load_plain")
        labels = ("save", "save,\nplain safetensors", "load", "load,\nplain safetensors")
        right.bar(labels, [files[f"{name}_gb_per_second"] for name in names], color=["C0", "C7", "C0", "C7"])
        right.set_ylabel("GB per second")
        right.set_title(f"{PREFIX:,} tokens of the real model, {files['bytes'] / 1e6:.0f} MB")
    figure.suptitle(record.values["setting"]["hardware"])
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="Hub id or folder; the packaged model by default")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hardware", default=f"{platform.machine()}, {torch.get_num_threads()} CPU threads")
    arguments = parser.parse_args()
    name = Path(arguments.model or "packaged").name
    record = Record(RESULTS / f"store-cpu-{name}.json")
    record.values["setting"] = {
        "hardware": arguments.hardware,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": name,
        "dtype": "float32",
    }
    if "match" in arguments.parts:
        for entries in ENTRIES:
            record.once(f"match in {entries} prefixes", lambda entries=entries: measure_match(entries))
    if set(arguments.parts) - {"match"}:
        model, _ = load_model(arguments.model, dtype=torch.float32)
        model.generation_config.pad_token_id = 0
        measures = {
            "fingerprint": lambda: measure_fingerprint(model),
            "files": lambda: measure_files(model, arguments.repeats),
            "overhead": lambda: measure_overhead(model, arguments.repeats),
            "memory": lambda: measure_memory(model),
        }
        for part, measure in measures.items():
            if part in arguments.parts:
                record.once(part, measure)
    draw(record, record.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
