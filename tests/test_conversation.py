"""Branches: what is tried is exact, rolled back without a trace, and committed where asked."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.words import word_tokenizer
from hf_prefix_cache.compat import CACHE_ARGUMENT
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

OPTIONS = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
MODELS = {**TINY_MODELS, **RECURRENT_MODELS}


def uncached(model, ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)


def longer(ids, tokens):
    return torch.cat([ids, torch.randint(3, 99, (1, tokens))], dim=1)


# Mamba names its cache otherwise before 5.24, and is refused there.
@pytest.fixture(params=["llama", "gemma3_text", "jamba", "lfm2", *(["mamba"] if CACHE_ARGUMENT == "cache" else [])])
def wrapped(request):
    return hpc.PrefixCachedModel(MODELS[request.param]())


@pytest.fixture
def prefix(wrapped):
    return wrapped.prefill(torch.randint(3, 99, (1, 20)))


def test_tries_marks_and_rollbacks_equal_uncached_calls(wrapped, prefix):
    with wrapped.branch(prefix) as branch:
        first = branch.generate(longer(prefix.input_ids, 4), **OPTIONS)
        assert torch.equal(first, uncached(wrapped.model, first[:, :24]))
        mark = branch.mark()
        for _ in range(2):
            prompt = longer(first, 3)
            assert torch.equal(branch.generate(prompt, **OPTIONS), uncached(wrapped.model, prompt))
            assert wrapped.report().reused_tokens == first.shape[1] - 1
            branch.rollback(mark)
            assert torch.equal(branch.input_ids, first)
        branch.rollback()
        assert torch.equal(branch.input_ids, prefix.input_ids)


def test_nothing_reaches_the_store_before_commit_and_the_next_turn_continues_after_it(wrapped, prefix):
    store = hpc.store_for(wrapped.model)
    before = store.stats().insertions
    with wrapped.branch(prefix) as branch:
        answer = branch.generate(longer(prefix.input_ids, 4), **OPTIONS)
        assert store.stats().insertions == before
        committed = branch.commit()
        branch.generate(longer(answer, 2), **OPTIONS)
        branch.rollback()
        assert torch.equal(branch.input_ids, answer)
    assert torch.equal(committed.input_ids, answer[:, :-1])
    turn = longer(answer, 3)
    assert torch.equal(wrapped.generate(turn, **OPTIONS), uncached(wrapped.model, turn))
    assert wrapped.report().stored_tokens == answer.shape[1] - 1


def test_the_snapshot_is_unharmed(wrapped, prefix):
    before = [tensor.clone() for tensor in prefix.tensors]
    with wrapped.branch(prefix) as branch:
        branch.generate(longer(prefix.input_ids, 4), **OPTIONS)
    for tensor, kept in zip(prefix.tensors, before, strict=True):
        assert torch.equal(tensor, kept)


def test_a_prompt_that_rewrites_history_warns_and_is_exact(wrapped, prefix):
    prompt = longer(prefix.input_ids, 4)
    prompt[0, 10] = prompt[0, 10] % 90 + 4
    with wrapped.branch(prefix) as branch, pytest.warns(UserWarning, match="10"):
        assert torch.equal(branch.generate(prompt, **OPTIONS), uncached(wrapped.model, prompt))


# As templates of reasoning models do: history keeps no thinking, and a switch opens with an empty think block.
THINKING = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content.split('</think>')[-1] }} <|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if not enable_thinking %}<think> </think>{% endif %}{% endif %}"
)


def test_a_template_that_drops_an_empty_think_block_reuses_up_to_there_and_says_where():
    tool = {"type": "function", "function": {"name": "w7", "description": "", "parameters": {}}}
    options = {"enable_thinking": False, "tools": [tool]}
    tokenizer = word_tokenizer(THINKING)
    wrapped = hpc.PrefixCachedModel(MODELS["llama"](), tokenizer)
    chat = [{"role": "system", "content": "you are a helpful bot ."}]
    prefix = wrapped.prefill(chat, **options)
    assert "w7" in tokenizer.decode(prefix.input_ids[0])
    chat.append({"role": "user", "content": "what is one ?"})
    with wrapped.branch(prefix) as branch:
        first = branch.generate(chat, template_options=options, **OPTIONS)
        assert wrapped.report().reused_tokens == prefix.seq_length
        prompt = first[:, : wrapped.report().prompt_tokens]
        assert tokenizer.decode(prompt[0, -2:]).split() == ["<think>", "</think>"]
        assert torch.equal(first, uncached(wrapped.model, prompt))
        chat += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "and three ?"}]
        left_at = prompt.shape[1] - 2
        with pytest.warns(UserWarning, match=rf"leaves the prefix at token {left_at} of .*'<think>' in the prefix"):
            second = branch.generate(chat, template_options=options, **OPTIONS)
        assert wrapped.report().reused_tokens == left_at
        whole = second[:, : wrapped.report().prompt_tokens]
        assert torch.equal(second, uncached(wrapped.model, whole))
        branch.commit()


def test_what_a_branch_cannot_continue_is_refused():
    wrapped = hpc.PrefixCachedModel(MODELS["llama"]())
    prefix = wrapped.prefill([5, 6, 7])
    with wrapped.branch(prefix) as branch:
        with pytest.raises(hpc.InputMismatchError, match="2 rows"):
            branch.generate([[5, 6, 7, 8], [5, 6, 7, 9]], **OPTIONS)
        with pytest.raises(hpc.InputMismatchError, match="mark"):
            branch.rollback(hpc.Mark(prefix.input_ids, prefix))
    cache = prefix.to_cache()
    with (
        pytest.raises(hpc.SnapshotIncompleteError),
        wrapped.branch(cache.snapshot(model=wrapped.model)),
    ):
        pass
    with torch.no_grad():
        wrapped.model.lm_head.weight.mul_(1.5)
    with pytest.raises(hpc.FingerprintMismatchError), wrapped.branch(prefix):
        pass
