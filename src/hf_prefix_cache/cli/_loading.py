"""Loading what a command names, with one clear line where that fails."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from ._console import CommandError
from .demo_run import load

__all__ = ["load_config", "load_for_scoring", "load_tokenizer"]

T = TypeVar("T")


def load_config(name: str) -> Any:
    """Load the configuration of a model.

    Raises:
        CommandError: Transformers finds none of that name.
    """
    return _load("model", name, AutoConfig.from_pretrained)


def load_for_scoring(name: str | None) -> tuple[Any, Any]:
    """Load a model, or the packaged one, to where it computes fastest, and its tokenizer.

    Raises:
        CommandError: Transformers finds none of that name.
        MissingPackageError: The packaged model was asked for and is not installed.
    """
    model: Any
    model, tokenizer = load(name)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_tokenizer(name: str | None) -> Any:
    """Load a tokenizer by name, or the packaged model's.

    Raises:
        CommandError: Transformers finds none of that name.
        MissingPackageError: The packaged model was asked for and is not installed.
    """
    return load(None)[1] if name is None else _load("tokenizer", name, AutoTokenizer.from_pretrained)


def _load(what: str, name: str, loader: Callable[[str], T]) -> T:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return loader(name)
    except Exception as error:  # Transformers raises errors of many kinds for names and folders that are not models
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommandError(f"the {what} {name!r} could not be loaded: {reason[0]}") from error
