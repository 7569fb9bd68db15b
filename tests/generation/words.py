"""A tokenizer of whole words with a chat template, for the vocabulary of the tiny models."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import VOCAB_SIZE

_TEXT = "you are a helpful bot . ? hello what is one two three four five six seven Alpha Other first second !"
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"]
VOCABULARY = [*_SPECIAL, *_TEXT.split(), *(f"w{index}" for index in range(VOCAB_SIZE))][:VOCAB_SIZE]

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words; unknown ones are `<eos>`."""
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=template,
        padding_side="left",
    )
