"""Text pairs to token pairs, by the rules of lm-evaluation-harness."""

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..exceptions import RequestError

__all__ = ["encode_pairs"]

_BATCH = 1000


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[Sequence[str]],
    *,
    prefix_token_id: int | None = None,
    add_bos_token: bool | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Encode ``(context, continuation)`` texts for `loglikelihood`, as lm-evaluation-harness does.

    Spaces at the end of a context are moved to its continuation. Both are tokenized together, and the continuation is
    what follows the tokens of the context alone. An empty context becomes the prefix token, unless the continuation
    begins with that token already: then that first token is the context.

    Two cases in which the harness stops with an assertion have a result here. If a context has no token of its own
    (spaces only), the prefix token stands for it. If the continuation merges into the context's last token, so that no
    token is left for it, the pair is split where the tokens of the context alone and of both together part.

    Args:
        tokenizer: The model's tokenizer.
        pairs: Pairs of texts.
        prefix_token_id: What an empty context becomes; by default the tokenizer's beginning-of-text token, or else its
            end-of-text token.
        add_bos_token: Whether the tokenizer adds special tokens; by default as it is set up to.

    Returns:
        Pairs of lists of token ids, in the order given.

    Raises:
        RequestError: If a pair is not two texts, or a prefix token is needed and there is none; the message names its
            index.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "[BOS]": 3}, unk_token="one"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="[BOS]")
        >>> encode_pairs(tokenizer, [("one two", " three"), ("", "two")])
        [([0, 1], [2]), ([3], [1])]
    """
    texts = [_checked(pair, index) for index, pair in enumerate(pairs)]
    if prefix_token_id is None:
        prefix_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    encode = _Encoder(tokenizer, prefix_token_id, add_bos_token)
    moved = [_with_spaces_moved(context, continuation) for context, continuation in texts]
    encode.add([context for context, _ in moved if context])
    encode.add([context + continuation for context, continuation in moved if context])
    encode.add([continuation for context, continuation in moved if not context], special=False)

    encoded = []
    for index, ((given, _), (context, continuation)) in enumerate(zip(texts, moved, strict=True)):
        if context:
            context_ids, whole = encode(context), encode(context + continuation)
            continuation_ids = whole[len(context_ids) :]
            if not continuation_ids and continuation:
                common = _common_length(context_ids, whole[:-1])
                context_ids, continuation_ids = whole[:common], whole[common:]
        else:
            context_ids, continuation_ids = [], encode(continuation, special=False)
        if not context_ids:
            if prefix_token_id is None:
                raise RequestError(
                    f"pair {index} has the context {given!r}, which is no token, and the tokenizer has neither a "
                    "beginning-of-text nor an end-of-text token; pass prefix_token_id"
                )
            if continuation_ids[:1] == [prefix_token_id]:
                context_ids, continuation_ids = continuation_ids[:1], continuation_ids[1:]
            else:
                context_ids = [prefix_token_id]
        encoded.append((list(context_ids), list(continuation_ids)))
    return encoded


class _Encoder:
    """Encodes each distinct text once, many at a time."""

    def __init__(self, tokenizer: Any, prefix_token_id: int | None, add_bos_token: bool | None) -> None:
        self._tokenizer = tokenizer
        self._add_bos_token = add_bos_token
        self._prefix = tokenizer.decode([prefix_token_id]) if prefix_token_id is not None else None
        self._known: dict[tuple[str, bool | None], list[int]] = {}

    def add(self, texts: list[str], *, special: bool | None = None) -> None:
        by_option: dict[bool | None, list[str]] = {}
        for text in dict.fromkeys(texts):
            by_option.setdefault(self._option(text, special), []).append(text)
        for option, distinct in by_option.items():
            options = {} if option is None else {"add_special_tokens": option}
            for start in range(0, len(distinct), _BATCH):
                batch = distinct[start : start + _BATCH]
                encoding = self._tokenizer(
                    batch, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options
                )
                for text, ids in zip(batch, encoding["input_ids"], strict=True):
                    self._known[text, special] = ids

    def __call__(self, text: str, *, special: bool | None = None) -> list[int]:
        return self._known[text, special]

    def _option(self, text: str, special: bool | None) -> bool | None:
        if special is not None:
            return special
        # A text that brings its own beginning-of-text token is not given a second one.
        if self._prefix is not None and text.startswith(self._prefix):
            return False
        return self._add_bos_token


def _checked(pair: Any, index: int) -> tuple[str, str]:
    if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise RequestError(f"pair {index} is {pair!r:.60}; a pair is two texts, (context, continuation)")
    return pair[0], pair[1]


def _with_spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def _common_length(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
