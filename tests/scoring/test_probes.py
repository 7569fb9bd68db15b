"""Log-probabilities and greedy marks read from logits."""

import numpy as np
import pytest
import torch

from hf_prefix_cache.scoring import probes
from hf_prefix_cache.scoring.probes import read_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_slices_read_what_the_whole_log_softmax_has_and_the_first_of_equals_is_greedy(
    dtype, rows_at_once, monkeypatch
):
    generator = torch.Generator().manual_seed(0)
    vocab = 11
    monkeypatch.setattr(probes, "_CPU_SLICE", 4 * vocab * rows_at_once)
    # Few different values, so that many rows have their maximum several times.
    logits = torch.randint(0, 3, (20, vocab), generator=generator).to(dtype)
    places = torch.from_numpy(np.sort(np.concatenate([np.arange(20), np.arange(0, 20, 2)])))
    targets = torch.randint(0, vocab, (len(places),), generator=generator)
    targets[::3] = logits.argmax(-1)[places[::3]]

    logprobs, is_greedy = read_logits(logits, places, targets, torch.float32)

    whole = torch.log_softmax(logits, -1, dtype=torch.float32)[places]
    torch.testing.assert_close(logprobs, whole.gather(1, targets[:, None])[:, 0], atol=0, rtol=0)
    assert torch.equal(is_greedy, whole.argmax(-1) == targets)
    tied = (whole == whole.amax(-1, keepdim=True)).sum(-1) > 1
    assert is_greedy[tied].any()
    assert not is_greedy[tied].all()
