"""The weights of a model wherever they are: on devices, in host memory, on disk, or packed into few bits.

With accelerate's offloading a parameter has its values only while its module runs; in between, a hook of the module
knows where they are. With bitsandbytes a parameter holds the bits, and the scales lie beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Weight", "input_device", "layer_devices", "weights_of"]


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a model's weights.

    Attributes:
        name: Its name; that of the parameter or buffer, and what of it the tensor is, where there are several.
        tensor: The tensor where it is at hand; of weights on disk only one of the same shape and dtype.
        on_disk: What reads it from there; None where it is at hand.
        mark: What can be seen of it without reading: object, address, version and layout, or the file with size and
            time.
    """

    name: str
    tensor: torch.Tensor
    on_disk: Any = None
    mark: tuple[object, ...] = ()

    def read(self) -> torch.Tensor:
        """Return the tensor with its values; from disk if it is there."""
        values: torch.Tensor = self.tensor if self.on_disk is None else self.on_disk()
        return values


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that takes the inputs of ``model``: where its weights are, or, offloaded, where they go."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    for module in model.modules():
        for hook in _hooks(module):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return device


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Return the device that each of the ``layers`` layers of the decoder computes on."""
    default = input_device(model)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == layers)
    return [_computes_on(layer) or default for layer in next(lists, [None] * layers)]


def _computes_on(module: torch.nn.Module | None) -> torch.device | None:
    """Return where ``module`` computes, as far as its hooks or its weights say."""
    if module is None:
        return None
    hooks = (hook for inner in module.modules() for hook in _hooks(inner) if hook.execution_device is not None)
    hook = next(hooks, None)
    if hook is not None:
        return torch.device(hook.execution_device)
    return next((parameter.device for parameter in module.parameters()), None)


def weights_of(model: PreTrainedModel) -> Iterator[Weight]:
    """Yield every parameter and buffer of ``model`` once, with scales of packed ones, from wherever they are.

    Without a hook that knows its values, a tensor on the meta device is yielded as it is: such a model cannot run.
    """
    modules = dict(model.named_modules())
    seen: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        if tensor.device.type == "meta":
            weight = _offloaded(modules, name) or Weight(name, tensor, mark=(id(tensor),))
            if id(weight.tensor) not in seen:  # tied ones are apart on the meta device only
                seen[id(weight.tensor)] = weight.tensor
                yield weight
            continue
        for part_name, part in (("", tensor), *_scales(modules[owner], leaf, tensor)):
            for inner_name, inner in _plain(part):
                yield Weight(name + part_name + inner_name, inner, mark=_mark(inner))


def _hooks(module: torch.nn.Module) -> list[Any]:
    """Return accelerate's hooks of ``module`` that place its weights."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # several in a row
    return [hook for hook in hooks if hasattr(hook, "weights_map")]


def _offloaded(modules: dict[str, torch.nn.Module], name: str) -> Weight | None:
    """Return the weight ``name`` from where the hook of its module, or of one around it, keeps it."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        leaf = name.removeprefix(f"{owner}.") if owner else name
        for hook in _hooks(modules[owner]):
            if hook.offload and hook.weights_map is not None and leaf in hook.weights_map:
                return _from_map(name, hook.weights_map, leaf)
    return None


def _from_map(name: str, weights: Any, key: str) -> Weight:
    while hasattr(weights, "dataset"):  # a view of a larger map under a prefix
        weights, key = weights.dataset, weights.prefix + key
    at_hand = getattr(weights, "state_dict", weights)
    if key in at_hand:
        tensor = at_hand[key]
        return Weight(name, tensor, mark=_mark(tensor))
    entry = weights.index[key]
    path = entry.get("safetensors_file") or os.path.join(weights.save_folder, f"{key}.dat")
    state = os.stat(path)
    mark = (path, state.st_ino, state.st_size, state.st_mtime_ns)
    return Weight(name, torch.empty(0, device="meta"), lambda: weights[key], mark)


def _scales(module: torch.nn.Module, leaf: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what gives the bits of ``tensor`` their values, and is neither parameter nor buffer."""
    state = getattr(tensor, "quant_state", None)  # 4 bits of bitsandbytes
    if state is not None:
        yield from _tensors_of(".quant_state", state)
    rows = getattr(tensor, "SCB", None)  # 8 bits of bitsandbytes; the first forward moves them to the module
    if rows is None and leaf == "weight":
        rows = getattr(getattr(module, "state", None), "SCB", None)
    if rows is not None:
        yield ".SCB", rows
    if leaf == "W_q":  # HQQ
        yield from _tensors_of(".meta", getattr(module, "meta", {}))


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in ``value``, an object or dict that holds them, perhaps in others like it."""
    entries = value if isinstance(value, dict) else vars(value)
    for key, entry in sorted(entries.items()):
        if isinstance(entry, torch.Tensor):
            yield f"{name}.{key}", entry
        elif isinstance(entry, dict) or type(entry).__name__ == "QuantState":
            yield from _tensors_of(f"{name}.{key}", entry)


def _plain(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``tensor``, or the tensors that it is made of where it only stands for others (Quanto, torchao)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        for inner_name, inner in _plain(getattr(tensor, name)):
            yield f".{name}{inner_name}", inner


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    # Tensors made in inference mode have no version counter and refuse the question.
    version = None if tensor.is_inference() else tensor._version
    address = tensor.data_ptr() if tensor.device.type != "meta" else 0
    return id(tensor), address, version, tuple(tensor.shape), tensor.stride()
