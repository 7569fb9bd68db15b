"""Shared-prefix attention beyond `generate`: in the wrapper's forward and in scoring, on nested and ragged trees."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache import attention, sharing
from hf_prefix_cache.attention import gate, interface
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.layers import KeyValues
from hf_prefix_cache.scoring import routes
from tiny_models import TINY_MODELS

SHARING = ["llama", "qwen3", "gpt2", "gemma3_text", "llama4"]


@pytest.fixture
def counted(monkeypatch):
    """The calls of shared-prefix attention, with the cost gate wide open."""
    calls = []

    def count(*arguments):
        calls.append(arguments)
        return attention.shared_prefix_attention(*arguments)

    monkeypatch.setattr(gate, "_CROSSOVER", 1)
    monkeypatch.setattr(interface, "shared_prefix_attention", count)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHARING)
def test_the_wrapper_attends_shared_in_forward_on_padded_suffixes_and_single_tokens(name, side, counted):
    model = TINY_MODELS[name]()
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-dynamic")
    prefix_ids, lengths = torch.randint(3, 99, (1, 24)), (4, 1, 3)
    prefix = wrapped.prefill(prefix_ids)
    suffixes, mask = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    rows = [torch.randint(3, 99, (length,)) for length in lengths]
    for index, row in enumerate(rows):
        place = slice(4 - len(row), 4) if side == "left" else slice(0, len(row))
        suffixes[index, place], mask[index, place] = row, 1
    logits = wrapped.forward(suffixes, prefix=prefix, attention_mask=mask).logits
    one_each = wrapped.forward(suffixes[:, :1] + 3, prefix=prefix).logits
    assert counted
    for index, row in enumerate(rows):
        expected = model(torch.cat([prefix_ids[0], row])[None], use_cache=False).logits[0, 24:]
        torch.testing.assert_close(logits[index, mask[index].bool()], expected, atol=1e-4, rtol=0)
        alone = torch.cat([prefix_ids, suffixes[index : index + 1, :1] + 3], dim=1)
        torch.testing.assert_close(one_each[index], model(alone).logits[0, 24:], atol=1e-4, rtol=0)


def test_forward_with_gradients_takes_the_ordinary_path(counted):
    model = TINY_MODELS["llama"]()
    wrapped = hpc.PrefixCachedModel(model)
    prefix = wrapped.prefill(list(range(3, 30)))
    logits = wrapped.forward(torch.randint(3, 99, (3, 4)), prefix=prefix).logits
    assert logits.requires_grad
    assert not counted


def test_scoring_on_forks_attends_shared_and_gives_the_scores_of_plain_rows(counted, monkeypatch):
    model = TINY_MODELS["llama"]()
    context = torch.randint(3, 99, (20,)).tolist()
    requests = [(context + torch.randint(3, 99, (2,)).tolist(), torch.randint(3, 99, (3,)).tolist()) for _ in range(5)]
    monkeypatch.setattr(routes, "PACKED_MODEL_TYPES", frozenset())
    scores = hpc.loglikelihood(model, requests, progress=False)
    assert hpc.last_scoring_report(model).route == "forked"
    assert counted
    for (given, asked), score in zip(requests, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([given + asked])).logits[0, len(given) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(asked)[:, None]).sum()
        assert score.logprob == pytest.approx(picked.item(), abs=1e-4)


def test_the_gate_says_why_and_the_report_carries_it():
    model = TINY_MODELS["llama"]()
    assert attention.sharing_gate(model, 1, 4096) == (False, "")
    assert "8 rows attend to 16 shared tokens each by itself" in attention.sharing_gate(model, 8, 16).reason
    prompts = torch.cat([torch.randint(3, 99, (1, 60)).expand(20, -1), torch.randint(3, 99, (20, 2))], dim=1)
    for rows, words in ((20, "20 rows attend to 60 shared tokens once"), (5, "each by itself")):
        model.generate(prompts[:rows], cache_implementation="prefix-dynamic", max_new_tokens=2, pad_token_id=0)
        (note,) = hpc.last_report(model).notes
        assert words in note
    model.set_attn_implementation("eager")
    gate_of_eager = attention.sharing_gate(model, 20, 60)
    assert not gate_of_eager.is_open
    assert "sdpa" in gate_of_eager.reason


@pytest.mark.parametrize(
    ("heads", "key_heads"), [(4, 4), (6, 2), (8, 1)], ids=["multi-head", "grouped", "multi-query"]
)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("queries", [1, 5])
def test_ragged_nested_trees_equal_the_reference_row_by_row(heads, key_heads, dtype, allowed, queries):
    """Three levels, the last per row; own tokens of unequal number, padded on the right and masked."""
    torch.manual_seed(queries)
    head_dim, own_lengths = 16, (1, 7, 3, 5)
    rows, width = len(own_lengths), max(own_lengths)

    def run(count, tokens):
        return KeyValues(*(torch.randn(count, key_heads, tokens, head_dim).to(dtype) for _ in range(2)))

    system, document, turn, own = run(1, 33), run(1, 9), run(rows, 4), run(rows, width)
    query = torch.randn(rows, heads, queries, head_dim).to(dtype)
    mask = torch.zeros(rows, 1, queries, width, dtype=dtype)
    for row, length in enumerate(own_lengths):
        mask[row, :, :, length:] = float("-inf")
    result = attention.shared_prefix_attention(query, (system, document, turn), own, mask, 0.25)
    for row, length in enumerate(own_lengths):
        pick = slice(row, row + 1)
        levels = (system, document, KeyValues(*(part[pick] for part in turn)))
        alone = KeyValues(*(part[pick, :, :length] for part in own))
        expected = attention.reference_attention(query[pick], levels, alone, None, 0.25)
        torch.testing.assert_close(result[pick].double(), expected, atol=allowed, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_two_nested_levels_are_each_held_and_attended_to_once(name, counted):
    """A system prompt, a document behind it, and rows behind both: no level is copied into the next."""
    model = TINY_MODELS[name]()
    system, document, suffixes = (
        torch.randint(3, 99, (1, 24)),
        torch.randint(3, 99, (1, 10)),
        torch.randint(3, 99, (3, 2)),
    )
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(system, **cache_argument(cache))
    inner = cache.fork()
    model(document, **cache_argument(inner))
    rows = inner.fork(batch_size=3)
    with rows.attend_shared():
        logits = model(suffixes, **cache_argument(rows)).logits
    assert [segment.tokens for segment in counted[0][1]] == [24, 10]
    prompts = torch.cat([system.expand(3, -1), document.expand(3, -1), suffixes], dim=1)
    torch.testing.assert_close(logits, model(prompts, use_cache=False).logits[:, 34:], atol=1e-4, rtol=0)
    held = hpc.total_nbytes([cache, inner, rows])
    assert held < (24 + 10 + 3 * 2) / 24 * cache.nbytes * 1.1 + 4096


@pytest.mark.slow
def test_greedy_text_of_twenty_prompts_and_eight_rows_on_the_real_model_is_the_uncached_one(packaged_model):
    model, tokenizer = packaged_model
    hpc.store_for(model).clear()
    rules = (
        "You answer in one short sentence. " + "The museum opens at nine and closes at six, but not on Mondays. " * 14
    )
    subjects = ("the sea", "a bicycle", "bread", "the moon", "an owl", "rain", "a bridge", "music", "salt", "a clock")
    verbs = ("What is {}?", "Write a line about {}.", "Why does {} matter?", "Who likes {}?")
    verbs += ("Describe {}.", "Is {} old?", "When did {} begin?", "Name three uses of {}.")
    for index in range(20):
        subject = subjects[index % 10]
        prompts = [f"{rules}\nNote {index}: today it is about {subject}.\n{verb.format(subject)}\n" for verb in verbs]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        options = {**inputs, "do_sample": False, "max_new_tokens": 12}
        output = model.generate(cache_implementation="prefix-dynamic", **options)
        assert "8 rows attend to" in hpc.last_report(model).notes[0]
        assert "once" in hpc.last_report(model).notes[0]
        assert torch.equal(output, model.generate(**options))


@pytest.mark.parametrize("name", SHARING)
def test_prompts_behind_a_known_prefix_attend_to_it_apart_in_single_rows_and_on_static_buffers(
    name, counted, monkeypatch
):
    monkeypatch.setattr(gate, "_WORTH_A_MERGE", 1)
    monkeypatch.setattr(gate, "_CROSSOVER", 10**9)
    model, prefix = TINY_MODELS[name](), torch.randint(3, 99, (1, 30))
    hpc.PrefixCachedModel(model, strategy="prefix-dynamic").prefill(prefix)
    assert sharing.hands_keys_over(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for strategy in ("prefix-dynamic", "prefix-static"):
        for rows in (1, 3):
            prompts = torch.cat([prefix.expand(rows, -1), torch.randint(3, 99, (rows, 6))], dim=1)
            options["attention_mask"], seen = torch.ones_like(prompts), len(counted)
            output = model.generate(prompts, cache_implementation=strategy, **options)
            assert torch.equal(output, model.generate(prompts, **options))
            assert hpc.last_report(model).stored_tokens == 30
            # In the prefill, not in decode steps.
            assert {query.shape[2] for query, *_ in counted[seen:]} == {6}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_whether_keys_arrive_at_attention_is_tried_out_once_and_leaves_nothing(name, counted):
    model = TINY_MODELS[name]()
    first, seen = sharing.hands_keys_over(model), len(counted)
    assert bool(counted) == (name in SHARING)
    assert first == (name not in ("bloom", "gpt_oss"))  # attention of their own
    assert sharing.hands_keys_over(model) == first
    assert len(counted) == seen
    assert not model.training


def test_a_model_that_changes_its_keys_takes_the_ordinary_path(counted, monkeypatch):
    model = TINY_MODELS["llama"]()
    original = interface.attached

    def lose(keys):
        original(keys)  # the mark arrives, what it stands for does not

    monkeypatch.setattr(interface, "attached", lose)
    prompts = torch.cat([torch.randint(3, 99, (1, 60)).expand(4, -1), torch.randint(3, 99, (4, 2))], dim=1)
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 4, "do_sample": False}
    output = model.generate(prompts, cache_implementation="prefix-dynamic", **options)
    assert torch.equal(output, model.generate(prompts, **options))
    assert "changes its keys" in hpc.last_report(model).notes[0]
