"""A run of tokens in few bits: what a quantized layer holds in place of keys and values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..exceptions import InputMismatchError
from ..quantization import Quantizer, Scheme
from .state import KeyValues

__all__ = ["QuantizedRun", "join_runs", "quantize_run"]

# Values decoded at a time: what a backend returns before it is in place is small beside a long layer. A short layer is
# decoded in one go, since parts of it would be copied before they are decoded.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class QuantizedRun:
    """Keys and values of a run of tokens, quantized in groups. Its tensors may be views; nobody writes into them.

    Attributes:
        scheme: What quantized it.
        keys: Tensors ``[rows, heads, groups, ...]``.
        values: The same for values.
        start: Tokens of the first group that no longer belong to the run.
        tokens: Tokens of the run.
        head_dims: Size of a head of keys and of values.
        dtype: Of the keys and values that were quantized.
        squares: For keys and for values, the squared error and the squared norm when they were quantized, float64
            ``[2, 2]``; of the whole groups and all rows that were quantized at a time.
    """

    scheme: Scheme
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    start: int
    tokens: int
    head_dims: tuple[int, int]
    dtype: torch.dtype
    squares: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.keys
        yield from self.values

    @property
    def rows(self) -> int:
        """Rows held: 1 where every row of a batch holds the same tokens."""
        return self.keys[0].shape[0]

    @property
    def groups(self) -> int:
        """Groups held."""
        return self.keys[0].shape[2]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.keys[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that it stands for."""
        return self.rows * self.tokens * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the key and the value that it stands for of one token in one row."""
        heads = (packed[0].shape[1] for packed in (self.keys, self.values))
        return sum(count * size for count, size in zip(heads, self.head_dims, strict=True)) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether every token of every group belongs to the run."""
        return self.tokens == self.groups * self.scheme.group_tokens

    def slice(self, start: int, stop: int) -> "QuantizedRun":
        """Return tokens ``start`` to ``stop`` as views of the groups that hold them."""
        size = self.scheme.group_tokens
        first, last = self.start + start, self.start + stop
        groups = slice(first // size, -(-last // size))
        return replace(self._map(lambda part: part[:, :, groups]), start=first % size, tokens=stop - start)

    def select(self, rows: torch.Tensor) -> "QuantizedRun":
        """Return copies of ``rows``; what a whole batch shares stays shared."""
        if self.rows == 1:
            return self
        index = rows.to(self.device)
        return self._map(lambda part: part.index_select(0, index))

    def row(self, index: int) -> "QuantizedRun":
        """Return one row as views."""
        return self if self.rows == 1 else self._map(lambda part: part[index : index + 1])

    def detach(self) -> "QuantizedRun":
        """Return itself: codes have no graph."""
        return self

    def to(self, device: torch.device | str) -> "QuantizedRun":
        """Return the run with its tensors on ``device``."""
        return replace(self._map(lambda part: part.to(device)), squares=self.squares.to(device))

    def kept(self, tensors: Sequence[torch.Tensor]) -> "QuantizedRun":
        """Return the run with ``tensors``, in the order in which it yields its own, in their place."""
        keys = len(self.keys)
        return replace(self, keys=tuple(tensors[:keys]), values=tuple(tensors[keys:]))

    def compact(self) -> "QuantizedRun":
        """Return the run with storage of its own."""
        return self._map(lambda part: part.clone(memory_format=torch.contiguous_format))

    def check_continued_by(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `InputMismatchError` unless tokens of these ``keys`` and ``values`` can follow."""
        for packed, size, new in zip((self.keys, self.values), self.head_dims, (keys, values), strict=True):
            if (packed[0].shape[1], size) != (new.shape[1], new.shape[3]):
                raise InputMismatchError(
                    f"the cache holds {packed[0].shape[1]} heads of size {size} and the model adds {new.shape[1]} of "
                    f"size {new.shape[3]}; use a cache made for this model"
                )

    def write(self, out: KeyValues) -> None:
        """Write keys and values into ``out``, ``[rows, heads, tokens, head_dim]`` each; one row goes to all rows."""
        for quantizer, packed, target in zip(
            (self.scheme.keys, self.scheme.values), (self.keys, self.values), out, strict=True
        ):
            _write(quantizer, packed, self.start, target[: self.rows])
            if self.rows < target.shape[0]:
                target[1:] = target[:1]

    def exact(self) -> KeyValues:
        """Return keys and values ``[rows, heads, tokens, head_dim]``, in storage of their own."""
        out = KeyValues(
            *(
                torch.empty((*packed[0].shape[:2], self.tokens, size), dtype=self.dtype, device=self.device)
                for packed, size in zip((self.keys, self.values), self.head_dims, strict=True)
            )
        )
        self.write(out)
        return out

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedRun":
        return replace(
            self, keys=tuple(change(part) for part in self.keys), values=tuple(change(part) for part in self.values)
        )


def quantize_run(scheme: Scheme, tokens: KeyValues) -> QuantizedRun:
    """Return ``tokens``, whole groups, in few bits, and measure the error that makes."""
    size = scheme.group_tokens
    with torch.no_grad():
        grouped = KeyValues(*(part.detach().unflatten(-2, (-1, size)) for part in tokens))
        run = QuantizedRun(
            scheme,
            scheme.keys.quantize(grouped.keys),
            scheme.values.quantize(grouped.values),
            start=0,
            tokens=tokens.tokens,
            head_dims=(tokens.keys.shape[-1], tokens.values.shape[-1]),
            dtype=tokens.keys.dtype,
            squares=torch.empty(0),
        )
        decoded = run.exact()
        squares = [
            torch.stack(
                [((was - now).float() ** 2).sum(dtype=torch.float64), (was.float() ** 2).sum(dtype=torch.float64)]
            )
            for was, now in zip(tokens, decoded, strict=True)
        ]
    return replace(run, squares=torch.stack(squares))


def join_runs(runs: Sequence[QuantizedRun]) -> QuantizedRun:
    """Return ``runs`` of whole groups, one after the other, as one with storage of its own."""
    if len(runs) == 1:
        return runs[0].compact()
    rows = max(run.rows for run in runs)

    def joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([part.expand(rows, *part.shape[1:]) for part in parts], dim=2)

    return replace(
        runs[0],
        keys=tuple(joined(parts) for parts in zip(*(run.keys for run in runs), strict=True)),
        values=tuple(joined(parts) for parts in zip(*(run.values for run in runs), strict=True)),
        tokens=sum(run.tokens for run in runs),
        squares=torch.stack([run.squares for run in runs]).sum(0),
    )


def _write(quantizer: Quantizer, packed: tuple[torch.Tensor, ...], start: int, out: torch.Tensor) -> None:
    """Write the tokens from ``start`` on into ``out``, ``[rows, heads, tokens, head_dim]``, some groups at a time."""
    rows, heads, tokens, head_dim = out.shape
    size = quantizer.group_tokens
    step = max(1, _CHUNK // (rows * heads * size * head_dim))
    for first in range(0, packed[0].shape[2], step):
        part = tuple(tensor[:, :, first : first + step] for tensor in packed)
        groups = part[0].shape[2]
        begin, end = first * size - start, (first + groups) * size - start
        if begin >= 0 and end <= tokens:
            quantizer.dequantize(part, out[:, :, begin:end].unflatten(2, (groups, size)))
            continue
        whole = out.new_empty((rows, heads, groups * size, head_dim))
        quantizer.dequantize(part, whole.unflatten(2, (groups, size)))
        kept = slice(max(0, -begin), groups * size - max(0, end - tokens))
        out[:, :, max(0, begin) : min(end, tokens)] = whole[:, :, kept]
