"""When attention over a shared prefix apart from own tokens pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..compat import takes_attention_interface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Gate", "is_worth_apart", "sharing_gate"]

# Keys that need not be read again, per layer and step, from which on the merge costs less than it saves: the part
# "crossover" of benchmarks/generation.py, on one core of a CPU. Below, the two are within noise of each other.
_CROSSOVER = 1024

# Tokens before a prompt, likewise for its prefill: about equal at 512, 1.3 times faster at 2,048.
_WORTH_A_MERGE = 512


class Gate(NamedTuple):
    """Whether rows attend to what they share apart, and why.

    Attributes:
        is_open: Whether they do.
        reason: Why, in words.
    """

    is_open: bool
    reason: str


def sharing_gate(model: PreTrainedModel, rows: int, shared_tokens: int) -> Gate:
    """Decide whether ``rows`` rows on ``shared_tokens`` tokens go on faster with shared-prefix attention.

    Args:
        model: The model; one whose keys do not go through Transformers' ``sdpa`` interface is not served.
        rows: Rows of the batch.
        shared_tokens: Tokens that all of them share.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> sharing_gate(model, 16, 2048).reason[:46]
        '16 rows attend to 2048 shared tokens once: 307'
    """
    saved = (rows - 1) * shared_tokens
    if not saved:
        return Gate(False, "")
    if saved < _CROSSOVER:
        return Gate(
            False,
            f"{rows} rows attend to {shared_tokens} shared tokens each by itself: only from {_CROSSOVER} keys a layer "
            f"on does it pay not to read them again, and here it is {saved}",
        )
    if not takes_attention_interface(model):
        return Gate(False, f"{type(model).__name__} does not attend through Transformers' sdpa interface")
    return Gate(
        True,
        f"{rows} rows attend to {shared_tokens} shared tokens once: {saved} keys a layer need not be read again, and "
        f"from {_CROSSOVER} on that pays",
    )


def is_worth_apart(model: PreTrainedModel, shared_tokens: int) -> bool:
    """Return whether a prompt behind ``shared_tokens`` tokens is fed faster if it attends to those apart.

    Even a single row gains: what is shared need not be copied beside its own tokens, nor repeated for grouped heads.
    """
    return shared_tokens >= _WORTH_A_MERGE and takes_attention_interface(model)
