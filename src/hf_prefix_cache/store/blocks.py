"""Blocks: the parts of pages that belong to one run of tokens; runs are cut without copying, and joined again."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..layers import AttentionState, KeyValues
from . import page as pages
from .page import Page

__all__ = ["Block", "copy_blocks", "cut_blocks", "gather_layers", "join_blocks"]


class Block(NamedTuple):
    """Tokens ``start`` to ``stop`` of a page.

    A run that is cut leaves one page to two runs, of which one follows the other. Nothing is copied until the
    latter is given up.
    """

    page: Page
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the page belongs to no other run."""
        return self.tokens == self.page.tokens

    @property
    def nbytes(self) -> int:
        """This part's share of the page's bytes."""
        return self.page.nbytes // self.page.tokens * self.tokens


def copy_blocks(layers: Sequence[AttentionState], start: int, stop: int) -> list[Block]:
    """Return copies of tokens ``start`` to ``stop`` of ``layers``, which hold all tokens from the first one on."""
    blocks = []
    for first in range(start, stop, pages.PAGE_TOKENS):
        last = min(first + pages.PAGE_TOKENS, stop)
        page = Page.of([_between(layer.segments, first, last) for layer in layers], last - first)
        blocks.append(Block(page, 0, page.tokens))
    return blocks


def cut_blocks(blocks: Sequence[Block], offset: int) -> tuple[list[Block], list[Block]]:
    """Return the blocks before and from token ``offset`` on. No copy: a page may then belong to both."""
    before, after = [], []
    for block in blocks:
        middle = min(block.stop, block.start + max(0, offset))
        if middle > block.start:
            before.append(block._replace(stop=middle))
        if middle < block.stop:
            after.append(block._replace(start=middle))
        offset -= block.tokens
    return before, after


def join_blocks(before: Sequence[Block], after: Sequence[Block]) -> list[Block]:
    """Return ``before`` and ``after`` as one run. Parts of one page become one, small pages where they meet too.

    Looking at two blocks of each side keeps any two neighbours above `PAGE_TOKENS` together, but for the first and the
    last pair of a run, however often it is cut and joined.
    """
    groups: list[list[Block]] = []
    for block in (*before[-2:], *after[:2]):
        last = groups[-1][-1] if groups else None
        if last is not None and last.page is block.page:
            groups[-1][-1] = last._replace(stop=block.stop)
        else:
            groups.append([block])
        if len(groups) > 1 and _fit(*groups[-2:]):
            groups[-2:] = [groups[-2] + groups[-1]]
    joint = [group[0] if len(group) == 1 else _join(group) for group in groups]
    return [*before[:-2], *joint, *after[2:]]


def gather_layers(blocks: Iterable[Block], tokens: int) -> list[tuple[KeyValues, ...]]:
    """Return the first ``tokens`` tokens of ``blocks`` as segments of each layer: views, one for each page."""
    parts: list[tuple[Page, int, int]] = []
    for page, start, stop in blocks:
        if tokens <= 0:
            break
        stop = min(stop, start + tokens)
        tokens -= stop - start
        if parts and parts[-1][0] is page:
            start = parts.pop()[1]
        parts.append((page, start, stop))
    return list(zip(*(page.layers(start, stop) for page, start, stop in parts), strict=True))


def _fit(left: Sequence[Block], right: Sequence[Block]) -> bool:
    both = (*left, *right)
    return all(block.is_whole for block in both) and sum(block.tokens for block in both) <= pages.PAGE_TOKENS


def _join(blocks: Sequence[Block]) -> Block:
    page = Page.joined([block.page for block in blocks])
    return Block(page, 0, page.tokens)


def _between(segments: Sequence[KeyValues], start: int, stop: int) -> list[KeyValues]:
    """Return the parts of ``segments`` that hold tokens ``start`` to ``stop``, as views."""
    parts, position = [], 0
    for segment in segments:
        end = position + segment.tokens
        if position < stop and end > start:
            parts.append(segment.slice(max(0, start - position), min(stop, end) - position))
        position = end
    return parts
