"""The prompts of a batch as token rows, and the masks and positions of a batch whose rows share a prefix."""

from dataclasses import dataclass

import torch

__all__ = ["PromptBatch", "common_prefix_length", "moved_mask", "positions_of", "read_batch"]


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts.

    Attributes:
        rows: The tokens of each row without padding, int64 ``[tokens]`` on the CPU.
        padding: The padding columns before each row.
    """

    rows: tuple[torch.Tensor, ...]
    padding: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Columns of the batch, padding included."""
        return len(self.rows[0]) + self.padding[0]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row) for row in self.rows)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row."""
        return min(len(row) for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row) for row in self.rows)

    @property
    def is_padded(self) -> bool:
        """Whether any row has padding."""
        return any(self.padding)


def read_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> PromptBatch | None:
    """Return the prompts in ``input_ids`` ``[rows, columns]``, or None where padding is not on the left alone."""
    ids = input_ids.cpu()
    if attention_mask is None:
        return PromptBatch(tuple(ids), (0,) * len(ids))
    mask = attention_mask.cpu().bool()
    if mask.shape != ids.shape:
        return None
    padding = (~mask).sum(1)
    columns = torch.arange(mask.shape[1])
    if not torch.equal(mask, columns[None] >= padding[:, None]) or not bool(mask.any(1).all()):
        return None
    counts = tuple(int(count) for count in padding)
    return PromptBatch(tuple(row[count:] for row, count in zip(ids, counts, strict=True)), counts)


def common_prefix_length(rows: tuple[torch.Tensor, ...]) -> int:
    """Return how many tokens all ``rows`` begin with together."""
    length = min(len(row) for row in rows)
    first = rows[0][:length]
    for row in rows[1:]:
        different = (row[:length] != first[:length]).nonzero()
        if len(different):
            length = int(different[0])
    return length


def moved_mask(batch: PromptBatch, shared: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the batch with the padding behind the first ``shared`` tokens instead of before them.

    Attention does not depend on the order of the columns, so with positions counted over the mask every row
    computes what it did before, while the shared prefix lies in the same columns of all rows::

        as passed:   . . S S S a        in the cache:   S S S . . a
                     . S S S b c                        S S S . b c
                     S S S d e f                        S S S d e f

    Returns:
        int64 ``[rows, columns]``.
    """
    index = torch.arange(batch.columns)
    padding = torch.tensor(batch.padding)[:, None]
    mask = (index[None] < shared) | (index[None] >= shared + padding)
    return mask.to(device=device, dtype=torch.int64)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return positions counted over the ones of ``mask``, 0 at padding, as ``generate`` counts them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
