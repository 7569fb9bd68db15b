"""Probes: the places where a token's log-probability is asked for, and reading them off logits."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from .requests import ContinuationScore, TokenRequests
from .tree import SortedRows

__all__ = ["Probes", "read_logits"]

# Bytes of float32 log-probabilities held at once: half of what one core's cache holds, where they are read again; on
# an accelerator enough to keep it busy.
_CPU_SLICE, _ACCELERATOR_SLICE = 2**20, 2**26


@dataclass(frozen=True)
class Probes:
    """One entry for each scored token of each request, in the requests' order.

    Attributes:
        rows: Row (of `SortedRows`) that is read, ``[probes]``, int64.
        depths: Place in the row whose logits predict the token, ``[probes]``, int64.
        targets: The token, ``[probes]``, int64.
        starts: Where each request's probes begin, ``[requests + 1]``, int64.
        logprobs: Filled in while scoring, ``[probes]``, float64.
        is_greedy: Filled in while scoring: whether the token is the most probable one, ``[probes]``, bool.
        softmax_dtype: Type in which log-probabilities are taken.
    """

    rows: np.ndarray
    depths: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    logprobs: np.ndarray
    is_greedy: np.ndarray
    softmax_dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, requests: TokenRequests, rows: SortedRows, softmax_dtype: torch.dtype) -> "Probes":
        """Lay out the probes of ``requests``."""
        counts = requests.continuation_lengths
        starts = np.concatenate([[0], np.cumsum(counts)])
        number = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        depths = np.repeat(requests.context_lengths - 1, counts) + number
        targets = requests.tokens[np.repeat(requests.starts[:-1], counts) + depths + 1]
        return cls(
            rows=np.repeat(rows.row_of_request, counts),
            depths=depths,
            targets=targets.astype(np.int64),
            starts=starts,
            logprobs=np.zeros(len(depths)),
            is_greedy=np.zeros(len(depths), dtype=bool),
            softmax_dtype=softmax_dtype,
        )

    def read(self, which: np.ndarray, logits: torch.Tensor, places: np.ndarray) -> None:
        """Fill in the probes ``which``, ``[n]``.

        Args:
            which: Places in these arrays, ``[n]``.
            logits: ``[m, vocab]``.
            places: The row of ``logits`` that predicts each, ``[n]``, ascending.
        """
        logprobs, is_greedy = read_logits(
            logits,
            torch.as_tensor(places),
            torch.as_tensor(self.targets[which], device=logits.device),
            self.softmax_dtype,
        )
        self.logprobs[which] = logprobs.double().cpu().numpy()
        self.is_greedy[which] = is_greedy.cpu().numpy()

    def fill(self, chosen: np.ndarray, part: "Probes") -> None:
        """Take over the results of ``part``, the probes of the requests for which ``chosen`` is true."""
        which = np.repeat(chosen, np.diff(self.starts))
        self.logprobs[which], self.is_greedy[which] = part.logprobs, part.is_greedy

    def scores(self) -> list[ContinuationScore]:
        """Return the score of each request."""
        logprobs, greedy, starts = self.logprobs.tolist(), self.is_greedy.tolist(), self.starts.tolist()
        return [
            ContinuationScore(sum(logprobs[a:b], 0.0), all(greedy[a:b]), tuple(logprobs[a:b]))
            for a, b in pairwise(starts)
        ]


def read_logits(
    logits: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, softmax_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target, and whether it is the most probable token.

    The log-softmax is taken of a few rows at a time, so that no second ``[m, vocab]`` tensor exists. It is torch's
    own, as in every plain evaluation: in float32 on a CPU it is off by some 1e-5 for each token, which cancels in a
    comparison with scores taken the same way.

    Args:
        logits: ``[m, vocab]``, any floating type.
        places: Row of ``logits`` for each target, ascending, ``[n]``, int64, on the CPU.
        targets: Token ids, ``[n]``, int64, on the device of ``logits``.
        softmax_dtype: Type in which the log-softmax is taken.

    Returns:
        Log-probabilities, ``[n]``, and booleans, ``[n]``.
    """
    slice_bytes = _CPU_SLICE if logits.device.type == "cpu" else _ACCELERATOR_SLICE
    step = max(1, slice_bytes // (4 * logits.shape[-1]))
    bounds = torch.searchsorted(places, torch.arange(0, len(logits) + step, step)).tolist()
    rows = places.remainder(step).to(logits.device)
    logprobs, is_greedy = [], []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        here, wanted = rows[begin:end], targets[begin:end]
        piece = torch.log_softmax(logits[number * step : (number + 1) * step], -1, dtype=softmax_dtype)
        found = piece[here, wanted]
        logprobs.append(found)
        is_greedy.append(_is_greedy(piece, here, wanted, found))
    return torch.cat(logprobs), torch.cat(is_greedy)


def _is_greedy(piece: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return whether each target is the first of the largest in its row, ``[n]``.

    The largest is found much faster than its place, and so is the largest beside a target. The place itself matters
    only where several are equal.

    Args:
        piece: ``[m, vocab]``.
        rows: Row of each target, ascending, ``[n]``.
        targets: Token ids, ``[n]``.
        found: Their values, ``[n]``.
    """
    greedy = found == piece.amax(-1)[rows]
    likely = greedy.nonzero()[:, 0]
    rows, targets, found = rows[likely], targets[likely], found[likely]
    piece[rows, targets] = -torch.inf
    others = piece.amax(-1)[rows]
    piece[rows, targets] = found
    # Two targets of one row that are both its largest have hidden each other.
    is_repeated = torch.zeros_like(rows, dtype=torch.bool)
    is_repeated[1:] = rows[1:] == rows[:-1]
    is_repeated[:-1] |= is_repeated[1:].clone()
    tied = ((others == found) | is_repeated).nonzero()[:, 0]
    greedy[likely[tied]] = piece[rows[tied]].argmax(-1) == targets[tied]
    return greedy
