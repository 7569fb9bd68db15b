"""Prompts in every form that users have them in."""

import numpy as np
import pytest
import torch

import hf_prefix_cache as hpc
from generation.words import TEMPLATE, word_tokenizer
from hf_prefix_cache.prompts import describe_divergence, encode_prefix, encode_prompts


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def encode(tiny_model):
    model, tokenizer = tiny_model("llama"), word_tokenizer()

    def call(prompts, **options):
        return encode_prompts(prompts, model=model, tokenizer=tokenizer, **options)

    return call


@pytest.fixture
def prefix(tiny_model):
    model = tiny_model("llama")

    def call(value, template=TEMPLATE, **options):
        return encode_prefix(value, model=model, tokenizer=word_tokenizer(template), **options)

    return call


def system(text="you are a helpful bot"):
    return {"role": "system", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([[5, 6, 7]]),
        torch.tensor([5, 6, 7], dtype=torch.int32),
        np.array([5, 6, 7]),
        [5, 6, 7],
        (5, 6, 7),
        [np.int64(5), 6, 7],
        [[5, 6, 7]],
        [torch.tensor([5, 6, 7])],
        [np.array([5, 6, 7])],
    ],
)
def test_ids_of_one_prompt_in_any_container(prompts, encode):
    ids, mask = encode(prompts)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[5, 6, 7]]
    assert mask is None or mask.tolist() == [[1, 1, 1]]


def test_ragged_rows_are_padded_on_the_left(encode):
    ids, mask = encode([[5, 6, 7], [8], torch.tensor([9, 10])])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 9, 10]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_a_tensor_stays_as_it_is_so_that_transformers_finds_its_padding(encode):
    ids, mask = encode(torch.tensor([[0, 5], [6, 7]]))
    assert ids.tolist() == [[0, 5], [6, 7]]
    assert mask is None


def test_text_is_what_the_tokenizer_makes_of_it(encode):
    tokenizer = word_tokenizer()
    ids, mask = encode(["hello bot", "what is one ?"])
    expected = tokenizer(["hello bot", "what is one ?"], padding=True, return_tensors="pt")
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    assert encode("hello bot")[0].tolist() == [tokenizer("hello bot")["input_ids"]]


def test_messages_get_a_generation_prompt(encode):
    tokenizer, chat = word_tokenizer(), [system(), user("what is one ?")]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encode(chat)[0].tolist() == [expected]
    ids, mask = encode([chat, [user("hello")]])
    assert ids.shape[0] == 2
    assert mask[1].sum() == len(tokenizer.apply_chat_template([user("hello")], return_dict=True)["input_ids"]) + 1


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], hpc.InputMismatchError, "prompts is empty"),
        (
            {"input_ids": [[5]]},
            hpc.InputMismatchError,
            "prompts is a dict; pass a list of messages, or of a tokenizer's",
        ),
        ([[]], hpc.InvalidTokensError, r"prompts has shape \[1, 0\]"),
        ([[5], []], hpc.InvalidTokensError, "it must hold at least one token"),
        ([5, 99], hpc.InvalidTokensError, "prompts holds the id 99; ids are 0 or more and below 99"),
        ([5, -1], hpc.InvalidTokensError, "the id -1"),
        ([[0.5]], hpc.InvalidTokensError, "dtype torch.float32"),
        ([True, False], hpc.InvalidTokensError, "dtype torch.bool"),
        (torch.zeros(1, 0, dtype=torch.long), hpc.InvalidTokensError, r"shape \[1, 0\]"),
        (torch.zeros(1, 2, 3, dtype=torch.long), hpc.InvalidTokensError, r"shape \[1, 2, 3\]"),
        ("", hpc.InvalidTokensError, "at least one token"),
        ([None], hpc.InputMismatchError, "a prompt is None; pass text, token ids, or a list of chat messages"),
        ([[user("hello")], 5], hpc.InputMismatchError, "a prompt is 5"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, error, message, encode):
    with pytest.raises(error, match=message):
        encode(prompts)


@pytest.mark.parametrize("prompts", ["hello", ["hello"], [user("hello")]])
def test_text_without_a_tokenizer_is_refused(prompts, tiny_model):
    with pytest.raises(hpc.InputMismatchError, match=r"need a tokenizer; pass it as PrefixCachedModel\(model, tok"):
        encode_prompts(prompts, model=tiny_model("llama"), tokenizer=None)


def test_ids_are_padded_without_a_tokenizer_and_without_a_padding_id(tiny_model):
    model = tiny_model("llama")
    model.generation_config.pad_token_id = None
    for end in (7, [7, 8]):
        model.generation_config.eos_token_id = end
        assert encode_prompts([[5, 6], [5]], model=model, tokenizer=None)[0].tolist() == [[5, 6], [7, 5]]
    model.generation_config.eos_token_id = None
    assert encode_prompts([[5, 6], [5]], model=model, tokenizer=None)[0].tolist() == [[5, 6], [0, 5]]


def test_the_prefix_of_messages_is_what_every_continuation_begins_with(prefix, encode):
    for chat in (
        [system()],
        [system(), user("what is one ?")],
        [system(), user("hello"), assistant("hello")],
        [user("hello")],
    ):
        ids = prefix(chat)[0]
        answered = chat[-1]["role"] != "user"
        follow = [user("two ?")] if answered else [assistant("two"), user("four")]
        for more in ([], [follow[0]], follow):
            if more or not answered:
                whole = encode([*chat, *more])[0][0]
                assert torch.equal(whole[: len(ids)], ids)
        assert len(ids) > 1 + sum(len(message["content"].split()) for message in chat)


def test_template_options_are_part_of_the_prefix(prefix):
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("w1", "w2")]
    assert len(prefix([system()], tools=tools)[0]) == len(prefix([system()])[0]) + 4


def test_a_template_that_drops_thoughts_from_history_shares_what_is_left(prefix):
    """The case of QwenLM/Qwen3 #1826: only the last answer keeps its thoughts."""
    rewriting = (
        "{% for message in messages %}<|{{ message.role }}|> "
        "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
        "{% else %}{{ message.content }}{% endif %} <|end|>{% endfor %}"
    )
    chat = [user("hello"), assistant("<think> w1 </think> one")]
    tokenizer = word_tokenizer(rewriting)
    history = tokenizer.apply_chat_template([*chat, user("two")], return_dict=True)["input_ids"]
    ids = prefix(chat, template=rewriting)[0].tolist()
    assert ids == history[: len(ids)]
    assert "<think>" not in tokenizer.decode(ids)


def test_text_and_ids_are_prefixes_as_they_are(prefix):
    assert prefix("hello bot")[0].tolist() == word_tokenizer()("hello bot")["input_ids"]
    assert prefix([5, 6])[0].tolist() == [5, 6]
    with pytest.raises(hpc.InputMismatchError, match="prefix is a dict"):
        prefix({"role": "user"})
    with pytest.raises(hpc.InvalidTokensError, match="prefix has shape"):
        prefix([])


def test_a_divergence_is_named_by_row_token_and_text():
    shared, tokenizer = torch.tensor([10, 11, 12, 13]), word_tokenizer()
    ids = torch.tensor([[0, 10, 11], [10, 11, 14]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    text = describe_divergence(ids, mask, shared)
    assert text.startswith("prompt 1 leaves the prefix at token 2 of 4 (14 in the prompt, 12 in the prefix)")
    assert repr(tokenizer.decode([14])) in describe_divergence(ids, mask, shared, tokenizer=tokenizer)
    assert describe_divergence(ids[:1], mask[:1], shared) == ""  # shorter, but no other
    assert describe_divergence(ids[:1], None, shared, pad_id=0) == ""
    assert describe_divergence(ids[:1], None, shared).startswith("prompt 0 leaves the prefix at token 0")
    assert describe_divergence(torch.tensor([[10, 11, 12, 13, 14]]), None, shared) == ""
