"""One call of ``generate`` with a prefix strategy: its options, and what it used."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..caches import PrefixCache
from ..exceptions import UnknownOptionError
from ..snapshot import PrefixSnapshot

__all__ = ["Call", "CallOptions", "current_call", "given_for", "given_prefix", "running_call"]


@dataclass(frozen=True)
class CallOptions:
    """What ``cache_config`` can say.

    Attributes:
        reuse: Whether the store is read and written.
        namespace: Tenant: prefixes are never shared across.
    """

    reuse: bool = True
    namespace: str = ""

    @classmethod
    def parse(cls, cache_config: Any) -> "CallOptions":
        """Read ``cache_config``, a dict or None.

        Raises:
            UnknownOptionError: Another key, or a value of another type.
        """
        options = dict(cache_config or {})
        for name, kind in (("reuse", bool), ("namespace", str)):
            if name in options and not isinstance(options[name], kind):
                raise UnknownOptionError(f"cache_config[{name!r}] is {options[name]!r}; it must be a {kind.__name__}")
        unknown = sorted(set(options) - {"reuse", "namespace"})
        if unknown:
            raise UnknownOptionError(
                f"cache_config has {', '.join(map(repr, unknown))}; the options of prefix strategies are 'reuse' and "
                "'namespace' (max_cache_len is an argument of generate)"
            )
        return cls(**options)


@dataclass
class Call:
    """A running call. What ``_prepare_cache_for_generation`` and ``_prefill`` leave here is used when it ends."""

    options: CallOptions = field(default_factory=CallOptions)
    strategy: str = ""
    cache: PrefixCache | None = None
    fingerprint: str = ""
    rows_continue: bool = False  # row i of the result continues row i of the prompt
    padding: tuple[int, ...] = ()  # padding columns of each row
    shared: int = 0  # columns of the cache before the padding: the shared prefix
    columns: int = 0  # columns of the prompts, padding included
    end_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    prompt: PrefixSnapshot | None = None  # where a window moves on, the state at the end of the prompt


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
