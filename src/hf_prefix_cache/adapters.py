"""Which adapters of a model act, as PEFT's layers and wrappers say, without importing PEFT.

A layer that holds adapters has the wrapped layer as ``base_layer``, and its adapters' weights in containers by adapter
name, which ``adapter_layer_names`` lists. A layer that is trained beside the adapters has copies of itself by adapter
name in ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["ActingAdapters", "adapter_state", "holds_adapters", "unwrapped"]

_COPIES = "modules_to_save"


def unwrapped(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, which computes the numbers; ``model`` itself where there is none.

    Wrappers that add virtual tokens compute something of their own, and stay.
    """
    while hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        inner = model.get_base_model()
        if inner is model or inner is model.base_model:
            return model
        model = inner
    return model


def holds_adapters(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a layer with adapters."""
    if _COPIES in module._modules:
        return hasattr(module, "_active_adapter")
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def adapter_state(module: Any) -> tuple[object, ...]:
    """Return what is changed in a layer with adapters while its tensors stay the same; cheap to ask for."""
    held = module.__dict__
    active, scaling = held.get("_active_adapter"), held.get("scaling")
    return (
        tuple(active) if isinstance(active, list) else active,
        held.get("_disable_adapters"),
        tuple(held.get("merged_adapters", ())),
        tuple(scaling.items()) if isinstance(scaling, dict) else None,
    )


class ActingAdapters:
    """What of one layer with adapters takes part in what it computes.

    Args:
        module: The layer.
        ignored: Take all its adapters for switched off.

    Attributes:
        names: The adapters that act, in order.
        description: What decides numbers beside their weights; empty where the layer computes what its base does.
    """

    def __init__(self, module: Any, *, ignored: bool) -> None:
        active = module._active_adapter
        self._copied = _COPIES in module._modules
        self.names: list[str] = []
        merged = list(getattr(module, "merged_adapters", ()))
        if not ignored and not module._disable_adapters and not merged:
            available = self._available(module)
            self.names = [name for name in ([active] if isinstance(active, str) else active) if name in available]
        # Layers that are merged and switched off take the merged weights out again when they run next.
        self.description = ["to be unmerged"] if merged and (ignored or module._disable_adapters) else []
        self.description += [self._describe(module, name) for name in self.names]
        self._containers = () if self._copied else tuple(module.adapter_layer_names)

    def keeps(self, path: str) -> str | None:
        """Return the name in the digest of the tensor at ``path`` inside the layer, or None if it does not act."""
        first, _, rest = path.partition(".")
        owner = rest.partition(".")[0]
        if self._copied:
            if first == "original_module":
                return None if self.names else rest
            return rest if first == _COPIES and owner in self.names else None
        if first == "base_layer":
            return rest
        if first in self._containers:
            return path if owner in self.names else None
        return path

    def _available(self, module: Any) -> set[str]:
        if self._copied:
            return set(module._modules[_COPIES])
        held: Any = [getattr(module, name, None) for name in module.adapter_layer_names]
        return {name for container in held if hasattr(container, "keys") for name in container.keys()}  # noqa: SIM118

    @staticmethod
    def _describe(module: Any, name: str) -> str:
        settings = {
            key: value[name]
            for key, value in vars(module).items()
            if isinstance(value, dict) and name in value and _is_plain(value[name])
        }
        variants: Iterable[Any] = [value.get(name) for key, value in vars(module).items() if key == "lora_variant"]
        return f"{name} {sorted(settings.items())} {[type(variant).__name__ for variant in variants]}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
