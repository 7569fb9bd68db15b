"""A tiny random model with a tokenizer whose tokens are bytes, in a folder."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tiny_models import DECODER, build

BOS = 256
VOCABULARY = 257


def save_model(folder, *, seed=0, max_length=256, bos_token="<s>"):
    """Save the model and return its folder as text; without ``bos_token`` nothing begins a text."""
    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<s>": BOS}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos_token).save_pretrained(folder)
    sizes = {**DECODER, "vocab_size": VOCABULARY, "max_position_embeddings": max_length}
    build(LlamaConfig(**{**sizes, "bos_token_id": BOS if bos_token else None}), seed=seed).save_pretrained(folder)
    return str(folder)
