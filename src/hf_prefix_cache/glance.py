"""A quick look at a model that tells whether anything in it may have changed since the last one."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .adapters import adapter_state, holds_adapters
from .model_settings import config_values, numerics_of, settings_of
from .model_tensors import follows_length
from .optimizer_steps import count_steps, stepped_since
from .samples import Samples
from .weights import weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Glance"]

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
# Asked of hundreds of tensors at each look, which is twice as fast without a loop of Python's.
_address = torch.Tensor.data_ptr
_size = operator.attrgetter("nbytes")
_version = operator.attrgetter("_version")
_storage = torch.Tensor.untyped_storage
_strides = torch.Tensor.stride  # a square weight whose data is turned round has the same bytes at the same address


class Glance:
    """What was seen of a model: identities, addresses and versions of its tensors, some values, and its settings.

    It holds no tensor and no module of the model.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._skips_frequencies = follows_length(model)
        modules = list(model.modules())
        self._modules = [weakref.ref(module) for module in modules[1:]]
        self._owners = [i for i, module in enumerate(modules) if module._parameters or module._buffers]
        self._parents = [i for i, module in enumerate(modules) if module._modules]
        self._steps = count_steps()
        self._settings, self._numerics = settings_of(model), numerics_of(model)
        self._config = copy.deepcopy(config_values(model.config))
        self._modes = [module.training for module in modules]
        adapters = [module for module in modules if holds_adapters(module)]
        self._adapters = [weakref.ref(module) for module in adapters]
        self._adapter_states = [adapter_state(module) for module in adapters]
        tensors = self._tensors_in(modules)
        storages = list(map(_storage, tensors))
        self._marks = self._marks_of(modules, tensors)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._ids = [id(tensor) for tensor in tensors]
        known = set(self._ids)
        weights = list(weights_of(model))
        # Scales of packed weights, which are neither parameters nor buffers.
        hidden = [weight.tensor for weight in weights if weight.on_disk is None and id(weight.tensor) not in known]
        self._hidden = [(weakref.ref(tensor), _mark(tensor)) for tensor in hidden]
        is_elsewhere = any(weight.on_disk is not None for weight in weights)
        self._elsewhere = [weight.mark for weight in weights] if is_elsewhere else None
        self._samples = Samples(tensors, _adapter_tensors(adapters))
        self._values = self._samples.read(tensors)
        del storages

    def is_unchanged(self, model: PreTrainedModel) -> bool:
        """Return whether nothing that decides the numbers of ``model`` has changed, as far as a quick look tells."""
        modules: list[Any] = [model, *(ref() for ref in self._modules)]
        if any(module is None for module in modules):
            return False
        tensors = self._tensors_in(modules)
        storages = list(map(_storage, tensors))  # held until values are read: another thread may move a weight
        marks = self._marks_of(modules, tensors)
        held = [ref() for ref in self._tensors]
        if marks != self._marks or not all(map(operator.is_, held, tensors)) or not self._same_beside():
            return False
        if self._elsewhere is not None and self._elsewhere != [weight.mark for weight in weights_of(model)]:
            return False
        stepped = stepped_since(self._steps)
        if stepped is None or not stepped.isdisjoint(self._ids):
            return False
        if not all(map(np.array_equal, self._samples.read(tensors), self._values)):
            return False
        del storages
        return self._same_settings(model, modules)

    def suspects(self, later: Glance) -> set[int] | None:
        """Return the ids of tensors that may hold other values in a ``later`` look though their marks are the same.

        None stands for all of them.
        """
        stepped = stepped_since(self._steps)
        if stepped is None:
            return None
        gone = {identity for ref, identity in zip(self._tensors, self._ids, strict=True) if ref() is None}
        gone |= {mark[0] for ref, mark in self._hidden if ref() is None}
        ours, theirs = self._values_by_id(), later._values_by_id()
        differing = {
            identity
            for identity, values in ours.items()
            if identity in theirs and not np.array_equal(values, theirs[identity])
        }
        return stepped | gone | differing

    def _values_by_id(self) -> dict[int, np.ndarray[Any, Any]]:
        """Return the sampled values of each tensor by its id."""
        return {self._ids[index]: values for index, values in self._samples.by_tensor(self._values).items()}

    def _tensors_in(self, modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
        """Return the tensors that hold bytes."""
        tensors: list[torch.Tensor] = []
        skips = self._skips_frequencies
        for index in self._owners:
            module = modules[index]
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or (skips and name.endswith("inv_freq")):
                        continue
                    if type(tensor) in _ORDINARY:
                        tensors.append(tensor)
                    else:
                        tensors += _parts(tensor)
        return tensors

    def _marks_of(self, modules: Sequence[torch.nn.Module], tensors: list[torch.Tensor]) -> list[object]:
        """Return what tells tensors and structure apart."""
        marks: list[object] = [*map(id, tensors), *map(_address, tensors), *map(_size, tensors), *_versions(tensors)]
        marks.extend(map(_strides, tensors))
        for index in self._parents:
            marks.extend(map(id, modules[index]._modules.values()))
        return marks

    def _same_beside(self) -> bool:
        """Return whether adapters act as before, and packed weights have the same scales."""
        states = [adapter_state(module) for ref in self._adapters if (module := ref()) is not None]
        if states != self._adapter_states:
            return False
        return all((tensor := ref()) is not None and _mark(tensor) == mark for ref, mark in self._hidden)

    def _same_settings(self, model: PreTrainedModel, modules: list[Any]) -> bool:
        values, modes = config_values(model.config), [module.training for module in modules]
        if values == self._config and modes == self._modes and numerics_of(model) == self._numerics:
            return True
        if settings_of(model) != self._settings:
            return False
        # Only what does not matter has changed: how the model is called, or its mode where nothing drops out.
        self._config, self._modes, self._numerics = copy.deepcopy(values), modes, numerics_of(model)
        return True


def _mark(tensor: torch.Tensor) -> tuple[int, ...]:
    return id(tensor), tensor.data_ptr(), *_versions([tensor])


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """Return the version counters; tensors made in inference mode have none and refuse the question."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the bytes of one that may be made of others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def _adapter_tensors(layers: list[torch.nn.Module]) -> set[int]:
    """Return the ids of the adapters' own tensors in ``layers``."""
    return {
        id(tensor)
        for layer in layers
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        if name.partition(".")[0] not in ("base_layer", "original_module")
    }
