"""Tiny models whose weights are not where they compute, or are packed into few bits."""

import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, PreTrainedModel

from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

MODELS = {**TINY_MODELS, **RECURRENT_MODELS}
CPU = torch.device("cpu")


def in_host_memory(name: str, folder) -> PreTrainedModel:
    """All weights in host memory; each comes to the device, for which the host stands, while its module runs."""
    return cpu_offload(MODELS[name](), execution_device=CPU)


def on_disk(name: str, folder) -> PreTrainedModel:
    """All weights in files."""
    return disk_offload(MODELS[name](), str(folder / "weights"), execution_device=CPU)


def mapped(name: str, folder) -> PreTrainedModel:
    """Every second layer and the head on disk, the rest where it computes, as ``from_pretrained`` spreads a model."""
    model = MODELS[name]()
    model.save_pretrained(folder / "saved")
    inner = model.model
    places = {f"model.{part}": "cpu" for part, _ in inner.named_children() if part != "layers"}
    places |= {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(len(inner.layers))}
    return AutoModelForCausalLM.from_pretrained(
        folder / "saved",
        device_map={**places, "lm_head": "disk"},
        offload_folder=folder / "offloaded",
        dtype=torch.float32,
    ).eval()


SPREADS = {"host": in_host_memory, "disk": on_disk, "mapped": mapped}
