"""What sharing would save on a set of requests, told from the token ids alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..compat import decoder_config
from ..key_value_sizes import key_value_widths
from .requests import TokenRequests, pack_requests
from .tree import SortedRows, sort_rows

__all__ = ["PrefixNode", "SharingPlan", "plan"]

_UNKNOWN_PREFIX = -1  # stands for the model's own beginning-of-text token, which a plan without a model does not know
_HEAVIEST = 10


@dataclass(frozen=True)
class PrefixNode:
    """A stretch of tokens that several requests read alike, up to where they part.

    Attributes:
        start: Tokens before this stretch (what it has in common with more requests than its own).
        end: Tokens up to where the requests part: the length of their common prefix.
        rows: Distinct token rows below.
        first_row: The first of these rows in sorted order.
        requests: Requests below.
        example: The index of one request that reads this prefix.
        parent: Place of the node above in ``SharingPlan.nodes``; -1 for the root.
        level: 1 for a node directly below the root.

    Example:
        >>> (node,) = plan([([1, 2], [3, 4]), ([1, 2], [5, 6])]).nodes
        >>> node.end, node.requests, node.saved_tokens
        (2, 2, 2)
    """

    start: int
    end: int
    rows: int
    first_row: int
    requests: int
    example: int
    parent: int
    level: int

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed because this stretch is computed once."""
        return (self.end - self.start) * (self.rows - 1)


@dataclass(frozen=True)
class SharingPlan:
    """How many tokens a set of requests takes, with and without sharing. Made by `plan`.

    Attributes:
        requests: Number of requests.
        total_tokens: Tokens read if each request is a row of its own.
        grouped_tokens: Tokens read with lm-evaluation-harness' one-token grouping, where requests that differ in the
            last token only are one row.
        unique_tokens: Tokens of the prefix tree: what `loglikelihood` computes.
        longest_row: Tokens of the longest row.
        levels: Number of stretches on the longest way from the root to a request's end.
        nodes: Every stretch that several distinct rows share, parents before children.
        row_lengths: Tokens of each distinct row, in sorted order.

    Example:
        >>> preamble = [1, 2, 3, 4, 5, 6]
        >>> sharing = plan([(preamble + [7], [8, 9]), (preamble + [7], [10, 11]), (preamble, [12])])
        >>> sharing.total_tokens, sharing.grouped_tokens, sharing.unique_tokens
        (22, 22, 9)
        >>> round(sharing.ideal_speedup, 2)
        2.44
    """

    requests: int
    total_tokens: int
    grouped_tokens: int
    unique_tokens: int
    longest_row: int
    levels: int
    nodes: tuple[PrefixNode, ...]
    row_lengths: tuple[int, ...]

    @property
    def ideal_speedup(self) -> float:
        """Tokens with the harness' one-token grouping over tokens of the tree."""
        return self.grouped_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def ideal_speedup_plain(self) -> float:
        """Tokens of plain rows over tokens of the tree."""
        return self.total_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def heaviest_prefixes(self) -> tuple[PrefixNode, ...]:
        """Return the shared stretches that save most, at most ten, the heaviest first."""
        heavy = sorted(self.nodes, key=lambda node: node.saved_tokens, reverse=True)
        return tuple(node for node in heavy[:_HEAVIEST] if node.saved_tokens)

    def kv_bytes(self, model: Any, dtype: torch.dtype | None = None, *, chunk_tokens: int = 512) -> int:
        """Return the bytes of keys and values that scoring holds at its peak: the longest row and a chunk.

        Args:
            model: A model or its configuration.
            dtype: Type of keys and values; by default the model's own.
            chunk_tokens: Tokens computed at once (``max_batch_tokens`` of `loglikelihood`).

        Returns:
            Bytes, for layers that keep keys and values of every token.

        Example:
            >>> from transformers import LlamaConfig
            >>> config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
            >>> plan([([1, 2, 3], [4])]).kv_bytes(config, torch.float32, chunk_tokens=1)
            4096
        """
        config = model if isinstance(model, PreTrainedConfig) else model.config
        dtype = dtype or getattr(model, "dtype", None) or getattr(decoder_config(config), "dtype", None)
        tokens = self.longest_row + min(chunk_tokens, self.unique_tokens)
        return sum(key_value_widths(config)) * (dtype or torch.float32).itemsize * tokens

    def draw(self, *, max_nodes: int = 24, width: int = 100) -> str:
        """Return a drawing of the prefix tree for the terminal, with the heaviest stretches in it."""
        from .drawing import draw_tree

        return draw_tree(self, max_nodes=max_nodes, width=width)

    def save_png(self, path: str | Path, *, title: str | None = None) -> None:
        """Draw the prefix tree as a picture: tokens to the right, requests downwards, every shared stretch once.

        Raises:
            MissingPackageError: If matplotlib is not installed.
        """
        from .drawing import save_picture

        save_picture(self, path, title=title)

    def __str__(self) -> str:
        lines = [
            f"{self.requests:,} requests, {self.levels} level{'s' if self.levels != 1 else ''}, longest row "
            f"{self.longest_row:,} tokens",
            f"  {self.total_tokens:>14,}  tokens as plain rows          {self.ideal_speedup_plain:8.2f}x",
            f"  {self.grouped_tokens:>14,}  with one-token grouping       {self.ideal_speedup:8.2f}x",
            f"  {self.unique_tokens:>14,}  each token once               {1.0:8.2f}x",
        ]
        if self.heaviest_prefixes:
            lines.append("heaviest shared prefixes (tokens saved, prefix length, requests below, one of them):")
        for node in self.heaviest_prefixes:
            lines.append(f"  {node.saved_tokens:>14,}  {node.end:>8,}  {node.requests:>8,}  #{node.example}")
        return "\n".join(lines)


def plan(requests: Iterable[Any] | TokenRequests, *, prefix_token_id: int | None = None) -> SharingPlan:
    """Tell what sharing would save, without a model.

    Args:
        requests: Pairs ``(context_ids, continuation_ids)``, as for `loglikelihood`.
        prefix_token_id: What an empty context becomes. By default a token that no request holds.

    Returns:
        The plan. For 100,000 requests of 500 tokens it takes seconds.

    Raises:
        RequestError: If a request is not a pair of token sequences; the message names its index.
        InvalidTokensError: If an id is not an integer; the message names the request's index.

    Example:
        >>> print(plan([([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7])]))
        2 requests, 2 levels, longest row 4 tokens
                       8  tokens as plain rows              1.60x
                       8  with one-token grouping           1.60x
                       5  each token once                   1.00x
        heaviest shared prefixes (tokens saved, prefix length, requests below, one of them):
                       3         3         2  #0
    """
    if not isinstance(requests, TokenRequests):
        requests = pack_requests(
            requests, prefix_token_id=_UNKNOWN_PREFIX if prefix_token_id is None else prefix_token_id
        )
    rows = sort_rows(requests)
    nodes = _shared_stretches(rows)
    # A row that ends where rows part adds no stretch of its own; every other one does.
    levels = max((node.level for node in nodes), default=0)
    deepest = {place for place, node in enumerate(nodes) if node.level == levels}
    own_ends = _rows_with_own_end(rows, nodes, deepest) if nodes else len(rows.lengths) > 0
    return SharingPlan(
        requests=len(requests),
        total_tokens=int(requests.fed_lengths.sum()),
        grouped_tokens=int(rows.lengths.sum()),
        unique_tokens=int((rows.lengths - rows.shared).sum()),
        longest_row=int(rows.lengths.max(initial=0)),
        levels=levels + int(own_ends),
        nodes=nodes,
        row_lengths=tuple(rows.lengths.tolist()),
    )


def _rows_with_own_end(rows: SortedRows, nodes: tuple[PrefixNode, ...], deepest: set[int]) -> bool:
    return any(
        (rows.lengths[node.first_row : node.first_row + node.rows] > node.end).any()
        for node in (nodes[place] for place in deepest)
    )


def _shared_stretches(rows: SortedRows) -> tuple[PrefixNode, ...]:
    """Find every maximal run of rows with a common prefix (the intervals of an LCP array), parents first."""
    count = len(rows.lengths)
    requests_before = np.zeros(count + 1, dtype=np.int64)
    used = rows.row_of_request[rows.row_of_request >= 0]
    np.cumsum(np.bincount(used, minlength=count), out=requests_before[1:])
    example = np.zeros(count, dtype=np.int64)
    example[used[::-1]] = np.flatnonzero(rows.row_of_request >= 0)[::-1]

    found: list[tuple[int, int, int, int]] = []  # first row, end row, start depth, end depth
    open_nodes: list[tuple[int, int]] = []  # first row, end depth
    for row, shared in enumerate([*rows.shared.tolist()[1:], 0] if count else [], start=1):
        first = row - 1
        while open_nodes and open_nodes[-1][1] > shared:
            first, end = open_nodes.pop()
            above = max(shared, open_nodes[-1][1] if open_nodes else 0)
            found.append((first, row, above, end))
        if shared > (open_nodes[-1][1] if open_nodes else 0):
            open_nodes.append((first, shared))

    found.sort(key=lambda node: (node[0], -node[1]))
    nodes: list[PrefixNode] = []
    path: list[int] = []
    for first, last, start, end in found:
        while path and nodes[path[-1]].first_row + nodes[path[-1]].rows <= first:
            path.pop()
        nodes.append(
            PrefixNode(
                start=start,
                end=end,
                rows=last - first,
                first_row=first,
                requests=int(requests_before[last] - requests_before[first]),
                example=int(example[first]),
                parent=path[-1] if path else -1,
                level=len(path) + 1,
            )
        )
        path.append(len(nodes) - 1)
    return tuple(nodes)
