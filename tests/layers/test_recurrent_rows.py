"""A running state that a reset left behind does not decide how many rows come next."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument, takes_cache
from recurrent_models import RECURRENT_MODELS


@pytest.mark.parametrize("forget", [lambda cache: cache.reset(), lambda cache: cache.crop_to(0)])
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "lfm2", "qwen3_next"])
@torch.no_grad()
def test_fewer_rows_may_follow_a_reset(name, forget):
    model = RECURRENT_MODELS[name]()
    if not takes_cache(model):
        pytest.skip("Mamba's own classes name their cache otherwise before 5.24, and are refused there")
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(input_ids=torch.randint(3, 99, (3, 6)), **cache_argument(cache))
    forget(cache)
    ids = torch.randint(3, 99, (1, 9))
    first = model(input_ids=ids[:, :5], **cache_argument(cache)).logits
    then = model(input_ids=ids[:, 5:], **cache_argument(cache)).logits
    torch.testing.assert_close(torch.cat([first, then], dim=1), model(input_ids=ids).logits, atol=1e-4, rtol=0)
