"""Moving prefixes between the memory of accelerators and that of the host."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from ..layers import LayerState
from ..snapshot import PrefixSnapshot
from .entry import Layout

__all__ = ["free_host_bytes", "is_on_accelerator", "to_home", "to_host"]

_HOST = torch.device("cpu")


def is_on_accelerator(layout: Layout) -> bool:
    """Return whether any of a prefix of ``layout`` is outside of host memory."""
    return any(device.type not in ("cpu", "meta") for layer in layout for _, device in layer.placed)


def to_host(snapshot: PrefixSnapshot) -> PrefixSnapshot:
    """Return ``snapshot`` in host memory."""
    return snapshot.to(_HOST)


def to_home(snapshot: PrefixSnapshot, home: Layout | None) -> PrefixSnapshot:
    """Return ``snapshot`` on the devices where its layers were.

    Args:
        snapshot: A prefix in host memory.
        home: How it was laid out before.
    """
    if home is None:
        return snapshot
    devices = [next((device for _, device in layer.placed), None) for layer in home]
    last = next((device for device in reversed(devices) if device is not None), _HOST)
    layers: tuple[LayerState, ...] = tuple(
        layer if device is None else layer.to(device) for layer, device in zip(snapshot.layers, devices, strict=True)
    )
    logits = snapshot.next_logits
    return replace(snapshot, layers=layers, next_logits=None if logits is None else logits.to(last))


def free_host_bytes() -> int:
    """Return the bytes of host memory that are free."""
    return int(psutil.virtual_memory().available)
