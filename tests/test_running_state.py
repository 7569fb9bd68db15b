"""Models with running states: every split, fork, restore and generate mode equals the uncached computation."""

import pytest
import torch
from transformers import DynamicCache

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import resumes_in_one_call
from hf_prefix_cache.compat import CACHE_ARGUMENT, takes_cache
from recurrent_models import RECURRENT_MODELS

TOKENS = 24
OPTIONS = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def model(request):
    model = RECURRENT_MODELS[request.param]()
    if not takes_cache(model):
        pytest.skip("Mamba's own classes name their cache otherwise before 5.24, and are refused there")
    return model


@pytest.fixture(params=["prefix-dynamic", "prefix-static"])
def strategy(request):
    return request.param


def new_cache(model, strategy):
    if strategy == "prefix-static":
        return hpc.PrefixStaticCache(config=model.config, max_cache_len=TOKENS + 8)
    return hpc.PrefixDynamicCache(config=model.config)


def run(model, ids, cache):
    """Feed ``ids`` as the model takes them behind a prefix, and return their logits."""
    is_empty = isinstance(cache, hpc.PrefixCache) and not cache.seq_length
    if is_empty or resumes_in_one_call(model.config):
        return model(ids, **{CACHE_ARGUMENT: cache}).logits
    return torch.cat([model(ids[:, i : i + 1], **{CACHE_ARGUMENT: cache}).logits for i in range(ids.shape[1])], dim=1)


def tolerance(model, ids, split, end, expected):
    """1e-4, or twice what plain Transformers deviates at this split, whichever is larger."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :split], **{CACHE_ARGUMENT: cache})
    own = (run(model, ids[:, split:end], cache) - expected).abs().max().item()
    return max(1e-4, 2 * own)


@torch.no_grad()
@pytest.mark.parametrize("suffix", [1, 2, 5])
def test_restored_and_forked_states_continue_as_if_uncached(model, strategy, suffix):
    ids = torch.randint(3, 99, (1, TOKENS))
    uncached = model(ids, use_cache=False).logits
    for split in range(1, TOKENS, 2):
        end = min(TOKENS, split + suffix)
        expected = uncached[:, split:end]
        allowed = tolerance(model, ids, split, end, expected)
        cache = new_cache(model, strategy)
        run(model, ids[:, :split], cache)
        assert cache.seq_length == split
        snapshot = cache.snapshot()
        batch = cache.fork(batch_size=3)
        run(model, torch.randint(3, 99, (1, 3)), cache)
        cache.restore(snapshot)
        continued = [
            (cache, 1),
            (batch, 3),
            (snapshot.to_cache("prefix-dynamic"), 1),
            (snapshot.to_cache("prefix-static", max_cache_len=TOKENS), 1),
        ]
        for holder, rows in continued:
            logits = run(model, ids[:, split:end].expand(rows, -1), holder)
            torch.testing.assert_close(logits, expected.expand(rows, -1, -1), atol=allowed, rtol=0)
            assert holder.seq_length == end


@torch.no_grad()
def test_crop_is_refused_and_changes_nothing(model, strategy):
    ids = torch.randint(3, 99, (1, 9))
    cache = new_cache(model, strategy)
    run(model, ids[:, :6], cache)
    with pytest.raises(hpc.NotCroppableError, match="restore a snapshot"):
        cache.crop(-1)
    with pytest.raises(hpc.NotCroppableError, match="running state"):
        cache.snapshot().crop_to(5)
    expected = model(ids[:, :7], use_cache=False).logits[:, -1]
    torch.testing.assert_close(run(model, ids[:, 6:7], cache)[:, -1], expected, atol=2e-3, rtol=0)


@torch.no_grad()
def test_several_tokens_in_one_call_are_refused_where_the_model_would_be_wrong(model, strategy):
    if resumes_in_one_call(model.config):
        return
    ids = torch.randint(3, 99, (1, 9))
    cache = new_cache(model, strategy)
    run(model, ids[:, :5], cache)
    with pytest.raises(hpc.UnsupportedModelError, match="one token at a time"):
        model(ids[:, 5:8], **{CACHE_ARGUMENT: cache})
    assert cache.seq_length == 5
    expected = model(ids, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(run(model, ids[:, 5:], cache), expected, atol=2e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(4, 4), (1, 4)], ids=["equal", "padded"])
def test_suffixes_behind_a_prefix_go_through_the_wrapper(model, strategy, lengths):
    if not takes_cache(model):
        return  # refused, see below
    ids = torch.randint(3, 99, (2, TOKENS))
    ids[1, :20] = ids[0, :20]
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    prefix = wrapped.prefill(ids[:1, :20])
    logits = wrapped.forward(ids[:, 20:], prefix=prefix, attention_mask=mask.long()).logits
    for row, length in enumerate(lengths):
        expected = model(ids[row : row + 1, : 20 + length], use_cache=False).logits[:, 20:]
        # Qwen 3-Next rounds by more than 1e-4 in a batch; tokens that are masked by mistake are off by whole numbers.
        torch.testing.assert_close(logits[row : row + 1, :length], expected, atol=1e-3, rtol=0)


@torch.no_grad()
def test_rows_are_reordered_repeated_and_selected_together(model, strategy):
    ids = torch.randint(3, 99, (2, 8))
    expected = model(ids, use_cache=False).logits[:, -1]
    cache = (
        hpc.PrefixStaticCache(config=model.config, max_cache_len=16, max_batch_size=4)
        if strategy == "prefix-static"
        else hpc.PrefixDynamicCache(config=model.config)
    )
    run(model, ids[:, :7], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    logits = run(model, ids[[1, 0], 7:], cache)[:, -1]
    torch.testing.assert_close(logits, expected[[1, 0]], atol=2e-3, rtol=0)


def test_models_that_name_their_cache_otherwise_are_refused_by_name(strategy):
    models = [build() for build in RECURRENT_MODELS.values()]
    refused = [model for model in models if not takes_cache(model)]
    if not refused:
        pytest.skip("on this release every model names its cache as all do")
    ids = torch.randint(3, 99, (1, 6))
    for model in refused:
        with pytest.raises(hpc.UnsupportedModelError, match=r"5\.24"):
            model.generate(ids, cache_implementation=strategy, **OPTIONS)
        with pytest.raises(hpc.UnsupportedModelError, match=r"5\.24"):
            hpc.PrefixCachedModel(model).prefill(ids)


@pytest.mark.parametrize(
    "extra",
    [{}, {"do_sample": True}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "sample", "beams", "returned"],
)
def test_generate_equals_the_uncached_call_and_reuses(model, strategy, extra):
    hpc.store_for(model).clear()
    options = {**OPTIONS, **extra}
    first = torch.randint(3, 99, (1, 20))
    answer = model.generate(first, cache_implementation=strategy, **OPTIONS)
    turn = torch.cat([answer, torch.randint(3, 99, (1, 4))], dim=1)
    for ids in (first, turn):
        mask = torch.ones_like(ids)
        torch.manual_seed(3)
        expected = model.generate(ids, attention_mask=mask, **options)
        torch.manual_seed(3)
        assert torch.equal(
            model.generate(ids, attention_mask=mask, cache_implementation=strategy, **options), expected
        )
    assert hpc.last_report(model).stored_tokens == answer.shape[1] - 1


def test_padded_batches_are_computed_afresh_and_say_so(model, strategy):
    ids = torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation=strategy, **OPTIONS), expected)
    report = hpc.last_report(model)
    assert report.reused_tokens == 0
    assert "padded" in report.reason
