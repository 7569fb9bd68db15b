"""Seeded random sequences of operations on architectures of different layer kinds."""

import pytest

from .build import build_architecture
from .sequences import RandomSequence

# full; window; chunk; shared keys; latent; indexed; block sparse; compressed; state space; hybrid; convolution; linear
ARCHITECTURES = (
    *("llama", "gemma3_text", "llama4_text", "gemma3n_text", "deepseek_v3", "deepseek_v32", "minimax_m3_vl_text"),
    *("deepseek_v4", "mamba", "falcon_h1", "lfm2", "qwen3_next"),
)
# One of each kind that static caches hold.
STATIC = ("llama", "gemma3_text", "llama4_text", "falcon_h1", "qwen3_next", "deepseek_v32")
STEPS = 1000


@pytest.mark.parametrize("name", ["gemma3n_text", "deepseek_v32", "lfm2"])
def test_a_short_sequence_is_exact_at_every_step(name):
    sequence = RandomSequence(build_architecture(name), seed=1)
    sequence.run(60)
    assert sequence.compared > 15


def test_a_short_sequence_on_static_caches_is_exact_at_every_step():
    sequence = RandomSequence(build_architecture("deepseek_v32"), seed=1, static=True)
    sequence.run(60)
    assert sequence.compared > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_thousand_steps_are_exact(name):
    sequence = RandomSequence(build_architecture(name), seed=2)
    sequence.run(STEPS)
    assert sequence.compared > STEPS // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", STATIC)
def test_a_thousand_steps_on_static_caches_are_exact(name):
    sequence = RandomSequence(build_architecture(name), seed=3, static=True)
    sequence.run(STEPS)
    assert sequence.compared > STEPS // 4
