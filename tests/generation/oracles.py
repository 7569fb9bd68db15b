"""What the tests of generation compare with: plain Transformers, and a count of the tokens that a model was fed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import runs_on_static_caches
from tiny_models import TINY_MODELS, VOCAB_SIZE, WINDOW

STRATEGIES = ("prefix-dynamic", "prefix-static")
FULL_ATTENTION = ("llama", "qwen3", "gpt2", "bloom")
WINDOWED = ("gemma3_text", "mistral", "gpt_oss", "llama4")
NEW_TOKENS = 5
# Bloom generates on static caches from some release on only.
STATIC_BLOOM = runs_on_static_caches(TINY_MODELS["bloom"]())
COMBINATIONS = [
    (name, strategy)
    for name in TINY_MODELS
    for strategy in STRATEGIES
    if (name, strategy) != ("bloom", "prefix-static") or STATIC_BLOOM
]

assert WINDOW == 8  # prompts below are longer than it


class Count:
    """Tokens that each forward was fed, columns of padding included."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    @property
    def tokens(self) -> int:
        return sum(self.calls)


@contextmanager
def counted(model) -> Iterator[Count]:
    """Count the tokens of every forward of ``model``."""
    count = Count()

    def count_tokens(_module, _args, kwargs):
        ids = kwargs.get("input_ids")
        ids = kwargs["inputs_embeds"][..., 0] if ids is None else ids
        count.calls.append(ids.numel())

    handle = model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids that are neither padding nor special."""
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def pad_left(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows ``[tokens]`` as one batch padded on the left, and its mask."""
    columns = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), columns, dtype=torch.long), torch.zeros(len(rows), columns, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, columns - len(row) :] = row
        mask[index, columns - len(row) :] = 1
    return ids, mask


def generated(model, ids=None, **options) -> torch.Tensor:
    """Return what ``model.generate`` returns: greedy and short where ``options`` say nothing else, always seeded.

    Never the padding id, which Transformers would take for padding when the answer becomes part of a prompt.
    """
    torch.manual_seed(0)
    defaults = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "suppress_tokens": [0]}
    return model.generate(ids, **{**defaults, **options})


class Checker:
    """Checks that calls with a strategy return what uncached ones do, and that their reports tell the truth.

    Args:
        model: The model.
        strategy: The strategy's name.
        known: Uncached results of models with the same weights; by default none are known.
    """

    def __init__(self, model, strategy: str, known: dict[str, torch.Tensor] | None = None) -> None:
        self.model, self.strategy = model, strategy
        self.known = {} if known is None else known

    @property
    def report(self) -> hpc.GenerationReport:
        return hpc.last_report(self.model)

    def __call__(self, ids: torch.Tensor, *, reused: int | None = None, **options) -> torch.Tensor:
        """Check a call and return its tokens.

        Args:
            ids: Prompts, ``[rows, columns]``; 0 is padding.
            reused: Prompt tokens that must not be computed; not checked where None.
            **options: Passed on to ``generate``.
        """
        key = str((ids.tolist(), sorted(options.items(), key=str)))
        if key not in self.known:
            self.known[key] = generated(self.model, ids, **options)
        with counted(self.model) as count:
            output = generated(self.model, ids, cache_implementation=self.strategy, **options)
        torch.testing.assert_close(output, self.known[key], rtol=0, atol=0)
        assert self.report.strategy == self.strategy
        mask = options.get("attention_mask", ids != 0)
        is_padded = not bool(mask.all())  # forwards are fed padding too, which reports leave out
        if not is_padded and not {"num_beams", "prompt_lookup_num_tokens", "assistant_model"} & set(options):
            steps = output.shape[1] - ids.shape[1] - 1
            assert count.tokens == self.report.computed_tokens + steps * self.report.rows
        if reused is not None:
            assert self.report.reused_tokens == reused, self.report
        hpc.store_for(self.model).sanity_check()
        return output
