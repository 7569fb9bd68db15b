import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_prefix_cache.exceptions import RequestError
from hf_prefix_cache.scoring import encode_pairs

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_pairs(*, adds_bos: bool = False, bos: bool = True) -> PreTrainedTokenizerFast:
    """Build a tokenizer that merges ``ab``, ``abc`` and a space with ``x``."""
    alphabet = ["Ġ", *LETTERS]
    vocab = {token: place for place, token in enumerate([*alphabet, "ab", "abc", "Ġx", "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c"), ("Ġ", "x")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>")


def harness_pair(tokenizer: PreTrainedTokenizerFast, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Encode one pair as lm-evaluation-harness 0.4 does (`TemplateLM.loglikelihood`, `HFLM.tok_encode`)."""
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

    def encode(text: str, **options: bool) -> list[int]:
        if not options and text.startswith(tokenizer.decode(prefix)):
            options = {"add_special_tokens": False}
        return tokenizer.encode(text, **options)

    if context == "":
        rest = encode(continuation, add_special_tokens=False)
        return ([prefix], rest) if rest[0] != prefix else (rest[:1], rest[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole, alone = encode(context + continuation), encode(context)
    return alone, whole[len(alone) :]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_pairs_are_encoded_as_the_harness_does(adds_bos: bool) -> None:
    tokenizer = byte_pairs(adds_bos=adds_bos)
    pairs = [
        ("def", " x"),
        ("def ", "x"),
        ("def  ", "xy"),
        ("da", "bd"),
        ("", "abc"),
        ("", "<s>abc"),
        ("<s>def", " x"),
        ("def", "abab"),
        ("def", "abab"),
    ]
    assert encode_pairs(tokenizer, pairs) == [harness_pair(tokenizer, *pair) for pair in pairs]


def test_a_token_across_the_boundary_keeps_the_rest_of_the_continuation() -> None:
    tokenizer = byte_pairs()
    ((context, continuation),) = encode_pairs(tokenizer, [("da", "bd")])
    # Together "d ab d", alone "d a": the harness scores what follows as many tokens as the context has.
    assert tokenizer.convert_ids_to_tokens(context) == ["d", "a"]
    assert tokenizer.convert_ids_to_tokens(continuation) == ["d"]


def test_a_continuation_that_merges_away_is_split_where_the_tokens_part() -> None:
    tokenizer = byte_pairs()
    merged, alone = encode_pairs(tokenizer, [("dab", "c"), ("ab", "c")])
    assert [tokenizer.convert_ids_to_tokens(part) for part in merged] == [["d"], ["abc"]]
    assert [tokenizer.convert_ids_to_tokens(part) for part in alone] == [["<s>"], ["abc"]]


def test_empty_texts_and_spaces_have_a_result() -> None:
    tokenizer = byte_pairs()
    encoded = encode_pairs(tokenizer, [("", ""), ("ab", ""), ("  ", "x")])
    assert [[tokenizer.convert_ids_to_tokens(part) for part in pair] for pair in encoded] == [
        [["<s>"], []],
        [["ab"], []],
        [["<s>"], ["Ġ", "Ġx"]],
    ]


def test_the_prefix_token_can_be_chosen_and_falls_back_to_end_of_text() -> None:
    tokenizer = byte_pairs(bos=False)
    assert encode_pairs(tokenizer, [("", "a")]) == [([tokenizer.eos_token_id], [tokenizer.convert_tokens_to_ids("a")])]
    assert encode_pairs(tokenizer, [("", "a")], prefix_token_id=3)[0][0] == [3]
    tokenizer.eos_token = None
    with pytest.raises(RequestError, match="pair 1 has the context ''"):
        encode_pairs(tokenizer, [("d", "e"), ("", "a")])


def test_special_tokens_can_be_switched_on_and_off() -> None:
    tokenizer = byte_pairs(adds_bos=True)
    assert encode_pairs(tokenizer, [("d", "e")])[0][0][0] == tokenizer.bos_token_id
    assert encode_pairs(tokenizer, [("d", "e")], add_bos_token=False)[0][0][0] != tokenizer.bos_token_id


@pytest.mark.parametrize("pair", ["ab", ("a",), ("a", 1), ("a", "b", "c")])
def test_what_is_not_two_texts_is_named(pair: object) -> None:
    with pytest.raises(RequestError, match="pair 1 is"):
        encode_pairs(byte_pairs(), [("a", "b"), pair])
