"""What a call asked for, reused and computed."""

import threading
import weakref
from dataclasses import dataclass

import torch

from .quantization import QuantizationError

__all__ = ["GenerationReport", "last_report", "record_report"]


@dataclass(frozen=True)
class GenerationReport:
    """What one call did with its prompt.

    Attributes:
        strategy: The strategy that ran, ``prefix-auto`` resolved.
        rows: Rows of the batch, after expansion for beams and returned sequences.
        prompt_tokens: Tokens of all rows' prompts, padding not counted: what an uncached call computes.
        computed_tokens: Tokens of the prompts that were fed to the model.
        stored_tokens: Length of the prefix that was found in the store or passed by the caller.
        reason: Why nothing or less was reused, in words; empty where nothing stood in the way.
        error: Relative error of the prefix that the call started from, where it is quantized; None where it is exact.
        notes: What else was decided, in words: how the rows attend to what they share, and buffers that grew.

    Example:
        >>> GenerationReport(
        ...     "prefix-dynamic", rows=2, prompt_tokens=80, computed_tokens=6, stored_tokens=37
        ... ).reused_tokens
        74
    """

    strategy: str
    rows: int
    prompt_tokens: int
    computed_tokens: int
    stored_tokens: int
    reason: str = ""
    error: QuantizationError | None = None
    notes: tuple[str, ...] = ()

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.prompt_tokens - self.computed_tokens


_lock = threading.Lock()
_reports: "weakref.WeakKeyDictionary[torch.nn.Module, GenerationReport]" = weakref.WeakKeyDictionary()


def record_report(model: torch.nn.Module, report: GenerationReport) -> None:
    """Make ``report`` the last one of ``model``."""
    with _lock:
        _reports[model] = report


def last_report(model: torch.nn.Module) -> GenerationReport | None:
    """Return what the last call on ``model`` with a prefix strategy asked for, reused and computed; None before one.

    Example:
        >>> last_report(torch.nn.Linear(1, 1)) is None
        True
    """
    with _lock:
        return _reports.get(model)
