"""The token tree: every distinct prefix of all requests once, in depth-first order, as flat arrays."""

from dataclasses import dataclass

import numpy as np

from .requests import TokenRequests

__all__ = ["SortedRows", "TokenTree", "build_tree", "sort_rows"]


@dataclass(frozen=True)
class SortedRows:
    """The distinct token rows of all requests in lexicographic order.

    A request's row is what a model reads for it: context and continuation without the last token. Requests for which
    nothing is scored have none.

    Attributes:
        starts: Where each row's tokens begin in ``TokenRequests.tokens``, ``[rows]``, int64.
        lengths: Tokens of each row, ``[rows]``, int64.
        shared: Tokens that each row has in common with the row before it, ``[rows]``, int64; 0 for the first.
        row_of_request: The row of each request, ``[requests]``, int64; -1 where it has none.
    """

    starts: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    row_of_request: np.ndarray


@dataclass(frozen=True)
class TokenTree:
    """A token tree in depth-first order; node ``i`` is the token at place ``i`` of that order.

    Node ``a`` is an ancestor of node ``b``, or ``b`` itself, exactly if ``a <= b < ends[a]``.

    Attributes:
        tokens: Token ids, ``[nodes]``, int32.
        depths: Number of ancestors, which is the token's position in its row, ``[nodes]``, int32.
        ends: One past the last descendant, ``[nodes]``, int64.
        first_nodes: The first node that each row adds, ``[rows]``, int64.
        shared: Depth of that node, ``[rows]``, int64.
        parents: The row that owns the token before it, ``[rows]``, int64; -1 at the root.
    """

    tokens: np.ndarray
    depths: np.ndarray
    ends: np.ndarray
    first_nodes: np.ndarray
    shared: np.ndarray
    parents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def nodes_at(self, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Return the node of each ``(row, depth)``, both ``[n]``, as ``[n]`` int64."""
        rows = rows.copy()
        while (above := depths < self.shared[rows]).any():
            rows[above] = self.parents[rows[above]]
        return self.first_nodes[rows] + depths - self.shared[rows]

    def ancestors_of(self, node: int) -> np.ndarray:
        """Return the ancestors of ``node`` from the root down, ``[depth]`` int64."""
        depth = int(self.depths[node])
        row = int(np.searchsorted(self.first_nodes, node, side="right")) - 1
        pieces = []
        while depth > 0:
            # A row's own nodes lie back to back; what is above them belongs to the row it branched from.
            while depth <= self.shared[row]:
                row = int(self.parents[row])
            first = int(self.first_nodes[row])
            pieces.append(np.arange(first, first + depth - int(self.shared[row])))
            depth = int(self.shared[row])
        return np.concatenate(pieces[::-1]) if pieces else np.zeros(0, dtype=np.int64)


def sort_rows(requests: TokenRequests) -> SortedRows:
    """Sort the requests' rows, drop duplicates and measure what neighbours share.

    Rows are compared as big-endian bytes, whose order is that of the token lists; no token is touched in Python.
    """
    data = requests.tokens.astype(">u4").tobytes()
    begins, fed = requests.starts[:-1].tolist(), requests.fed_lengths.tolist()
    keys = [data[4 * begin : 4 * (begin + length)] for begin, length in zip(begins, fed, strict=True)]
    order = sorted((i for i, length in enumerate(fed) if length), key=keys.__getitem__)

    row_of_request = np.full(len(keys), -1, dtype=np.int64)
    firsts: list[int] = []
    for i in order:
        if not firsts or keys[i] != keys[firsts[-1]]:
            firsts.append(i)
        row_of_request[i] = len(firsts) - 1

    starts = np.asarray([begins[i] for i in firsts], dtype=np.int64)
    lengths = np.asarray([fed[i] for i in firsts], dtype=np.int64)
    shared = np.zeros(len(firsts), dtype=np.int64)
    tokens = requests.tokens
    for row in range(1, len(firsts)):
        before, here = starts[row - 1], starts[row]
        size = min(lengths[row - 1], lengths[row])
        differs = tokens[before : before + size] != tokens[here : here + size]
        # Distinct rows of which one begins with the other differ only in length.
        shared[row] = differs.argmax() if differs.any() else size
    return SortedRows(starts, lengths, shared, row_of_request)


def build_tree(requests: TokenRequests, rows: SortedRows) -> TokenTree:
    """Build the token tree of sorted rows; the work is one step for each row, not for each token."""
    added = rows.lengths - rows.shared
    first_nodes = np.concatenate([[0], np.cumsum(added)])
    nodes = int(first_nodes[-1])
    place = np.arange(nodes) - np.repeat(first_nodes[:-1], added)
    depths = place + np.repeat(rows.shared, added)
    tokens = requests.tokens[np.repeat(rows.starts, added) + depths]

    ends = np.full(nodes, nodes, dtype=np.int64)
    parents = np.full(len(added), -1, dtype=np.int64)
    # The path to the row before: the rows that own its pieces, and how many nodes of each are still open.
    path: list[tuple[int, int]] = []
    for row, (shared, first) in enumerate(zip(rows.shared.tolist(), first_nodes.tolist(), strict=False)):
        while path and rows.shared[path[-1][0]] >= shared:
            owner, open_nodes = path.pop()
            begin = first_nodes[owner]
            ends[begin : begin + open_nodes] = first
        if path:
            owner, open_nodes = path[-1]
            begin, kept = first_nodes[owner], shared - int(rows.shared[owner])
            ends[begin + kept : begin + open_nodes] = first
            path[-1] = (owner, kept)
            parents[row] = owner
        path.append((row, int(added[row])))
    return TokenTree(tokens, depths.astype(np.int32), ends, first_nodes[:-1], rows.shared, parents)
