"""One forward of rows of equal length, with logits at the probed places only."""

from typing import Any

import numpy as np
import torch

from .model_access import forward_accepts, uses_virtual_tokens
from .probes import Probes

__all__ = ["read_forward"]


def read_forward(
    model: Any,
    input_ids: np.ndarray,
    probes: Probes,
    which: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    *,
    device: torch.device,
    **arguments: Any,
) -> None:
    """Feed rows of tokens and fill in the probes they answer.

    Args:
        model: The model.
        input_ids: Token ids without padding, ``[rows, tokens]``.
        probes: What to read; filled in place.
        which: Places in ``probes``, ``[n]``.
        rows: The row that answers each, ``[n]``.
        columns: The place in that row, ``[n]``.
        device: Where the model takes token ids.
        **arguments: More arguments of the forward, such as a cache.
    """
    kept, column = np.unique(columns, return_inverse=True)
    # Some heads cannot take zero rows, so a forward without probes still has the logits of one token.
    index = torch.as_tensor(kept if len(kept) else [0], dtype=torch.int64, device=device)
    ids = torch.as_tensor(input_ids, dtype=torch.int64, device=device)
    arguments = {"use_cache": False, "return_dict": True} | arguments
    if forward_accepts(model, "logits_to_keep") and not uses_virtual_tokens(model):
        logits = model(input_ids=ids, logits_to_keep=index, **arguments).logits
    else:
        logits = model(input_ids=ids, **arguments).logits
        # PEFT's learned tokens stand before the row, so places count from the row's end.
        logits = logits[:, logits.shape[1] - ids.shape[1] :][:, index.to(logits.device)]
    if len(which):
        places = rows * len(kept) + column
        ascending = np.argsort(places, kind="stable")
        probes.read(which[ascending], logits.flatten(0, 1), places[ascending])
