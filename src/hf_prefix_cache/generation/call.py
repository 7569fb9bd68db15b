"""One call of ``generate`` with a prefix strategy: its options, and what it used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..caches import PrefixCache
from ..exceptions import UnknownOptionError
from ..snapshot import PrefixSnapshot
from .batch import PromptBatch
from .steps import DecodeSteps
from .strategies import CACHE_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Call", "CallOptions", "current_call", "given_for", "given_prefix", "running_call"]


@dataclass(frozen=True)
class CallOptions:
    """What ``cache_config`` can say.

    Attributes:
        reuse: Whether the store is read and written.
        namespace: Tenant: prefixes are never shared across.
        cache: Options of the strategy's own cache.
    """

    reuse: bool = True
    namespace: str = ""
    cache: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, cache_config: Any, strategy: str) -> CallOptions:
        """Read ``cache_config`` of a call with ``strategy``, a dict or None, which is not changed.

        Raises:
            UnknownOptionError: Not a dict, a key that the strategy does not have, or a value of another type.
        """
        if cache_config is not None and not isinstance(cache_config, dict):
            raise UnknownOptionError(
                f"cache_config is {cache_config!r}; it must be a dict such as {{'reuse': False}} or None"
            )
        options = dict(cache_config or {})
        for name, kind in (("reuse", bool), ("namespace", str)):
            if name in options and not isinstance(options[name], kind):
                raise UnknownOptionError(f"cache_config[{name!r}] is {options[name]!r}; it must be a {kind.__name__}")
        own = {name: options.pop(name) for name in CACHE_OPTIONS.get(strategy, ()) if name in options}
        unknown = sorted(set(options) - {"reuse", "namespace"}, key=str)
        if unknown:
            others = "".join(f", and {', '.join(names)} of {owner!r}" for owner, names in CACHE_OPTIONS.items())
            raise UnknownOptionError(
                f"cache_config has {', '.join(map(repr, unknown))}, which {strategy!r} does not have; the options are "
                f"'reuse' and 'namespace' of all prefix strategies{others} (max_cache_len is an argument of generate)"
            )
        return cls(**options, cache=own)


@dataclass
class Call:
    """A running call. What its hooks leave here is used by later ones.

    Attributes:
        options: What ``cache_config`` said.
        strategy: The strategy that runs, ``prefix-auto`` resolved; empty where none was asked for.
        cache: The cache that was made for the call, or that the caller passed.
        is_own_cache: Whether the caller passed it.
        feeds_drafts: Whether the next forward is the first of assisted decoding, of the prompt with its first drafts.
        steps: Decode steps that were compiled ahead and attend only as far as needed.
        fingerprint: Of the model, where the store is used.
        copies: Neighbouring rows that are copies of one prompt, for beams and returned sequences.
        rows_continue: Whether row i of the result continues row i of the prompts.
        batch: The prompts whose tokens may be kept; None where token ids do not show what was computed.
        shared: Columns of the cache before its padding.
        kept_columns: Columns of the sequences that may be kept; later ones were computed with other frequencies.
        end_ids: Token ids that end a row.
        moved: Mask of the prompts' columns in the cache, int64 ``[rows, columns]``, where it has padding elsewhere.
        attends_shared: Whether decode steps attend to what rows share apart.
        notes: What was decided, in words, for the report.
        known_before: Token ids ``[rows or 1, n]`` in a passed cache before the prompt; None where they are unknown.
    """

    options: CallOptions = field(default_factory=CallOptions)
    strategy: str = ""
    cache: PrefixCache | None = None
    is_own_cache: bool = False
    feeds_drafts: bool = False
    steps: DecodeSteps | None = None
    fingerprint: str = ""
    copies: int = 1
    rows_continue: bool = False
    batch: PromptBatch | None = None
    shared: int = 0
    kept_columns: int | None = None
    end_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    moved: torch.Tensor | None = None
    attends_shared: bool = False
    notes: list[str] = field(default_factory=list)
    known_before: torch.Tensor | None = None


_call: ContextVar[Call | None] = ContextVar("hf_prefix_cache_call", default=None)
_given: ContextVar[tuple[PreTrainedModel, PrefixSnapshot] | None] = ContextVar("hf_prefix_cache_given", default=None)


def current_call() -> Call | None:
    """Return the innermost running call of this thread (or task)."""
    return _call.get()


@contextmanager
def running_call() -> Iterator[Call]:
    """Make a new call the innermost one."""
    call = Call()
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


@contextmanager
def given_prefix(model: PreTrainedModel, snapshot: PrefixSnapshot) -> Iterator[None]:
    """Let calls on ``model`` inside use ``snapshot`` beside what the store holds."""
    token = _given.set((model, snapshot))
    try:
        yield
    finally:
        _given.reset(token)


def given_for(model: torch.nn.Module) -> PrefixSnapshot | None:
    """Return the snapshot that the caller gave for ``model``."""
    given = _given.get()
    return given[1] if given is not None and given[0] is model else None
