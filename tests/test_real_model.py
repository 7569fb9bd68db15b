"""The packaged real model: with every strategy, its first 64 greedy tokens are the uncached ones."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import STRATEGIES, counted
from hf_prefix_cache.packaged_model import load_model
from hf_prefix_cache.sharing import hands_keys_over

pytestmark = pytest.mark.slow

INSTRUCTION = (
    "You answer questions about a small harbour town. Keep to what you are told. The town has a lighthouse from 1871, "
    "a fish market that opens at six, two bakeries, and a ferry that leaves every forty minutes until ten at night. "
    "The harbour master is called Imke. Dogs are allowed on the ferry but not in the market. Answer in full sentences."
)
QUESTIONS = (
    "When does the market open?",
    "May I take my dog on the ferry?",
    "Who is the harbour master, and how old is the lighthouse?",
    "It is nine in the evening. How many ferries leave before the last one?",
    "Write two lines of verse about the town.",
)


@pytest.fixture(scope="module")
def conversations(packaged_model):
    model, tokenizer = packaged_model
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    return prompts, [model.generate(prompt, max_new_tokens=64, do_sample=False) for prompt in prompts]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sixty_four_greedy_tokens_of_five_prompts_equal_the_uncached_ones(strategy, packaged_model, conversations):
    model, _ = packaged_model
    hpc.store_for(model).clear()
    for index, (prompt, expected) in enumerate(zip(*conversations, strict=True)):
        with counted(model) as count:
            output = model.generate(prompt, max_new_tokens=64, do_sample=False, cache_implementation=strategy)
        assert torch.equal(output, expected)
        report = hpc.last_report(model)
        assert count.calls[0] == report.computed_tokens
        assert (report.reused_tokens > 80) == (index > 0)  # the instruction
    hpc.store_for(model).sanity_check()


def test_the_wrapper_prefills_the_instruction_once(packaged_model, conversations):
    model, tokenizer = packaged_model
    hpc.store_for(model).clear()
    wrapped = hpc.PrefixCachedModel(model, tokenizer)
    prefix = wrapped.prefill([{"role": "system", "content": INSTRUCTION}])
    for question, prompt, expected in zip(QUESTIONS, *conversations, strict=True):
        chat = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
        output = wrapped.generate(chat, prefix=prefix, max_new_tokens=64, do_sample=False)
        assert torch.equal(output, expected)
        assert wrapped.report().stored_tokens >= prefix.seq_length
        assert wrapped.report().prompt_tokens == prompt.shape[1]


def test_a_left_padded_batch_of_all_questions(packaged_model, conversations):
    model, tokenizer = packaged_model
    prompts, _ = conversations
    texts = {"input_ids": [prompt[0].tolist() for prompt in prompts]}
    batch = tokenizer.pad(texts, padding_side="left", return_tensors="pt")
    expected = model.generate(**batch, max_new_tokens=24, do_sample=False)
    hpc.store_for(model).clear()
    for strategy in STRATEGIES:
        output = model.generate(**batch, max_new_tokens=24, do_sample=False, cache_implementation=strategy)
        assert torch.equal(output, expected)
        assert hpc.last_report(model).reused_tokens > 4 * 80


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_and_prompts_attend_apart_in_every_dtype(dtype):
    model, tokenizer = load_model(None, dtype=dtype)
    assert hands_keys_over(model)
    ids = tokenizer(INSTRUCTION * 8, return_tensors="pt").input_ids.repeat(8, 1)
    model.generate(ids, cache_implementation="prefix-dynamic", max_new_tokens=3, do_sample=False)
    assert "8 rows attend to" in hpc.last_report(model).notes[0]
    assert "once" in hpc.last_report(model).notes[0]
