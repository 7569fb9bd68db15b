"""When attention over a shared prefix apart from own tokens pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..compat import takes_attention_interface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["is_worth_sharing"]

# Keys that need not be read again, per layer and step, from which on the merge costs less than it saves.
# benchmarks/generation.py measures where that is.
_CROSSOVER = 1024


def is_worth_sharing(model: PreTrainedModel, rows: int, shared_tokens: int) -> bool:
    """Return whether ``rows`` rows on ``shared_tokens`` tokens decode faster with shared-prefix attention.

    Args:
        model: The model; one whose keys do not go through Transformers' ``sdpa`` interface is not served.
        rows: Rows of the batch.
        shared_tokens: Tokens that all of them share.
    """
    return (rows - 1) * shared_tokens >= _CROSSOVER and takes_attention_interface(model)
