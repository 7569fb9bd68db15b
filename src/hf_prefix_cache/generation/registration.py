"""Makes Transformers' ``generate`` know the ``prefix-*`` names, and takes that back."""

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..compat import generation_mixin, name_lists
from ..validation import STRATEGIES
from .compiled import leave_compiled_steps
from .hooks import HOOKS

__all__ = ["register", "unregister"]

_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}


def register() -> None:
    """Make ``generate`` take the ``prefix-*`` names as ``cache_implementation``. Importing the package does this.

    Calls that do not name them go through Transformers untouched. Calling it again changes nothing.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import GenerationConfig
        >>> hpc.register()
        >>> GenerationConfig(cache_implementation="prefix-static").cache_implementation
        'prefix-static'
    """
    mixin = generation_mixin()
    module, (every_name, static_names) = name_lists()
    with _lock:
        if _originals:
            return
        for name, hook in HOOKS.items():
            original = _originals[name] = getattr(mixin, name)
            setattr(mixin, name, _wrap(original, hook))
        setattr(module, every_name, (*getattr(module, every_name), *STRATEGIES))
        setattr(module, static_names, (*getattr(module, static_names), "prefix-static", "prefix-auto"))


def unregister() -> None:
    """Take back what `register` did. Calling it again changes nothing.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import GenerationConfig
        >>> hpc.unregister()
        >>> try:
        ...     GenerationConfig(cache_implementation="prefix-static")
        ... except ValueError as error:
        ...     print(str(error)[:22])
        Invalid `cache_impleme
        >>> hpc.register()
    """
    mixin = generation_mixin()
    module, (every_name, static_names) = name_lists()
    leave_compiled_steps()
    with _lock:
        for name, original in _originals.items():
            setattr(mixin, name, original)
        if _originals:
            for name in (every_name, static_names):
                setattr(module, name, tuple(entry for entry in getattr(module, name) if entry not in STRATEGIES))
        _originals.clear()


def _wrap(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    return method
