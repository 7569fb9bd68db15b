"""Decode steps of many rows on one shared prefix, and of one row: against Transformers' DynamicCache in the same run.

Prints what it runs on, warms up, repeats, and writes medians and ratios as JSON.

usage: python benchmarks/generation.py [--model NAME] [--dtype float32] [--rows 4 16] [--prefix 512 2048] [--steps 16]
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.packaged_model import load_model

RESULTS = Path(__file__).parent / "results"


def steps(model, cache, tokens):
    """Feed ``tokens`` ``[rows, steps]`` one column at a time; return seconds per step and the last logits."""
    seconds = []
    for column in tokens.split(1, dim=1):
        start = time.perf_counter()
        logits = model(column, **cache_argument(cache)).logits
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, logits


def held_bytes(cache):
    if isinstance(cache, hpc.PrefixCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def measure(model, prefix_tokens, rows, columns, repeats):
    """Return medians for one point of the grid; the contenders take turns, so that drift hits all of them."""
    prefix = torch.randint(10, 30000, (1, prefix_tokens), device=model.device)
    base = hpc.PrefixDynamicCache(config=model.config)
    model(prefix, logits_to_keep=1, **cache_argument(base))
    plain = DynamicCache(config=model.config)
    model(prefix, logits_to_keep=1, **cache_argument(plain))
    plain.batch_repeat_interleave(rows)
    tokens = torch.randint(10, 30000, (rows, columns), device=model.device)
    seconds = {"dynamic_cache": [], "shared": [], "unshared": []}
    logits, sizes = {}, {}
    for repeat in range(repeats + 1):
        unshared = base.fork(batch_size=rows)
        unshared.unshare()
        contenders = {"dynamic_cache": plain, "shared": base.fork(batch_size=rows), "unshared": unshared}
        for name, cache in contenders.items():
            if name == "shared":
                with cache.attend_shared():
                    taken, logits[name] = steps(model, cache, tokens)
            else:
                taken, logits[name] = steps(model, cache, tokens)
            if repeat:  # the first is for warming up
                seconds[name] += taken
            sizes[name] = held_bytes(cache)
        plain.crop(-columns)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "prefix": prefix_tokens,
        "rows": rows,
        "steps": columns,
        "seconds_per_step": medians,
        "speedup_shared": medians["dynamic_cache"] / medians["shared"],
        "speedup_unshared": medians["dynamic_cache"] / medians["unshared"],
        "bytes": sizes,
        "memory_ratio_shared": sizes["dynamic_cache"] / sizes["shared"],
        "largest_difference": (logits["shared"] - logits["dynamic_cache"]).abs().max().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="Hub id or folder; the packaged model by default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prefix", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    model, _ = load_model(arguments.model, dtype=getattr(torch, arguments.dtype))
    model = model.to(arguments.device)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    record = {
        "hardware": f"{platform.machine()}, {device}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": arguments.dtype,
        "points": [],
    }
    print({key: value for key, value in record.items() if key != "points"})
    for prefix in arguments.prefix:
        for rows in arguments.rows:
            point = measure(model, prefix, rows, arguments.steps, arguments.repeats)
            record["points"].append(point)
            print(
                f"prefix {prefix:5} rows {rows:3}: shared {point['speedup_shared']:.2f}x, "
                f"unshared {point['speedup_unshared']:.2f}x, memory 1/{point['memory_ratio_shared']:.1f}, "
                f"difference {point['largest_difference']:.1e}",
                flush=True,
            )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"generation-{arguments.device}-{arguments.dtype}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print("wrote", path.name)


if __name__ == "__main__":
    main()
