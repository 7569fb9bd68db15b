"""A count of what the compiler does."""

import logging

import pytest
import torch


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs that are compiled."""
    # The compiler writes down every step for whoever listens, and pytest listens to everything.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
