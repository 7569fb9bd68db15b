"""How much slower than the best is the strategy that `prefix-auto` takes?

Twelve settings of batch × prefix × new tokens: every exact strategy generates behind a known prefix, in turn, and the
regret is the chosen one's time over the best one's, minus 1. Predicted bytes stand beside those that were held. Each
setting is written to the results file as soon as it is measured and not measured again.

usage: python benchmarks/strategy.py [--dtype float32] [--repeats 3] [--note "other work on the other core"]
"""

import argparse
import itertools
import statistics

import torch

import hf_prefix_cache as hpc
from generation import CLOCKS, begin, random_tokens, timed
from hf_prefix_cache.compat import CACHE_ARGUMENT

ROWS, PREFIXES, NEW_TOKENS, QUESTION = (1, 4, 16), (256, 1024), (8, 32), 16
EXACT = ("prefix-dynamic", "prefix-static", "prefix-offloaded")


def measure(model, rows, prefix_tokens, new_tokens, repeats):
    """Return medians of every exact strategy for one setting, and what the choice costs."""
    prefix = random_tokens(model, 1, prefix_tokens)
    hpc.store_for(model).clear()
    hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(prefix)
    length = prefix_tokens + QUESTION + new_tokens
    choice = hpc.choose_strategy(model, tokens=length, batch_size=rows, shared_tokens=prefix_tokens)
    seconds, held = {name: [] for name in EXACT}, {}
    for repeat in range(repeats + 1):
        for name in EXACT:
            prompt = torch.cat([prefix.expand(rows, -1), random_tokens(model, rows, QUESTION)], dim=1)
            taken, output = timed(
                model,
                lambda prompt=prompt, name=name: model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    do_sample=False,
                    cache_implementation=name,
                    return_dict_in_generate=True,
                ),
            )
            if repeat:  # the first is for warming up
                seconds[name].append(taken)
            held[name] = output[CACHE_ARGUMENT].nbytes
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(medians, key=medians.get)
    return {
        "rows": rows,
        "prefix": prefix_tokens,
        "new_tokens": new_tokens,
        "seconds": medians,
        "chosen": choice.strategy,
        "reasons": list(choice.reasons),
        "best": best,
        "regret": medians[choice.strategy] / medians[best] - 1,
        "bytes_predicted": {name: choice.predictions[name] for name in EXACT},
        "bytes_held": held,
    }


def draw(record, path):
    """Plot the time of every strategy over the best one's, the choice marked."""
    from matplotlib.figure import Figure

    points = record.values["settings"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for place, name in enumerate(EXACT):
        ratios = [point["seconds"][name] / min(point["seconds"].values()) for point in points.values()]
        axes.bar([index + 0.27 * (place - 1) for index in range(len(points))], ratios, 0.25, label=name)
    for index, point in enumerate(points.values()):
        axes.text(
            index + 0.27 * (EXACT.index(point["chosen"]) - 1), 0.05, "chosen", rotation=90, ha="center", fontsize=8
        )
    axes.axhline(1.15, color="grey", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(points)), [name.replace(", ", "\n") for name in points], fontsize=7)
    setting = record.values["setting"]
    axes.set(ylabel="time over the best strategy's", title=f"{setting['model']}, {setting['hardware']}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="Hub id or folder; the packaged model by default")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: for one thread on a shared core")
    parser.add_argument("--note", default="", help="what else is to be known of the machine")
    arguments = parser.parse_args()
    model, record = begin("strategy", arguments)
    for rows, prefix, new in itertools.product(ROWS, PREFIXES, NEW_TOKENS):
        key = f"{rows} rows, {prefix} tokens, {new} new"
        record.once("settings", key, lambda sizes=(rows, prefix, new): measure(model, *sizes, arguments.repeats))
    points = record.values["settings"].values()
    record.values["largest_regret"] = max(point["regret"] for point in points)
    record.save()
    print(f"largest regret over {len(points)} settings: {record.values['largest_regret']:.3f}")
    draw(record, record.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
