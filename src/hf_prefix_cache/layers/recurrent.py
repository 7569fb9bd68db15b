"""Layers with a running state: convolution, state space, linear attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ..exceptions import BatchSizeError
from .kept import KeptState
from .nothing import NothingState
from .state import AttentionState

__all__ = [
    "LayerState",
    "PrefixRecurrentLayer",
    "RecurrentState",
]


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The running state of one layer after ``length`` tokens. It can be continued from there, and from nowhere else.

    Attributes:
        conv: For each state of the layer, the last inputs of its convolution, ``[rows, channels, width]``, or None.
        recurrent: For each state of the layer, its recurrent state, ``[rows, ...]``, or None.
        widths: For each state of the layer, the width of its convolution, or None.
        length: Tokens seen.
        attention: Keys and values, where the layer attends too.
    """

    conv: tuple[torch.Tensor | None, ...]
    recurrent: tuple[torch.Tensor | None, ...]
    widths: tuple[int | None, ...]
    length: int
    attention: AttentionState | None = None

    is_sliceable = False
    kept = "a running state, which exists only after the last token"

    @property
    def window(self) -> int | None:
        """Width of the attention's window, or None."""
        return None if self.attention is None else self.attention.window

    @property
    def rows(self) -> int:
        """Rows held: 1 where a whole batch can start from it."""
        held = [tensor.shape[0] for tensor in (*self.conv, *self.recurrent) if tensor is not None]
        return max([1, *held, *([] if self.attention is None else [self.attention.rows])])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor held."""
        for tensor in (*self.conv, *self.recurrent):
            if tensor is not None:
                yield tensor
        if self.attention is not None:
            yield from self.attention.tensors()

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept: all of them, or none."""
        return length in (0, self.length)

    def crop_to(self, length: int) -> "RecurrentState":
        """Return the state after the first ``length`` tokens. Ask `can_crop_to` before."""
        if length == self.length:
            return self
        empty = (None,) * len(self.conv)
        attention = None if self.attention is None else self.attention.crop_to(0)
        return RecurrentState(empty, empty, self.widths, 0, attention)

    def compact(self) -> "RecurrentState":
        """Return the same state; running states are copied when they are captured, and have no spare room."""
        return self if self.attention is None else replace(self, attention=self.attention.compact())

    def detach(self) -> "RecurrentState":
        """Return the same storage without the autograd graph."""
        return self._map(torch.Tensor.detach, AttentionState.detach)

    def select(self, rows: torch.Tensor) -> "RecurrentState":
        """Return the state of ``rows``, an index tensor of shape ``[n]``."""
        if self.rows == 1:
            return self
        return self._map(
            lambda tensor: tensor.index_select(0, rows.to(tensor.device)), lambda state: state.select(rows)
        )

    def row(self, index: int, start: int, stop: int) -> "RecurrentState":
        """Return row ``index``, whose tokens from ``start`` to ``stop`` (its padding) never entered the state."""
        one = self._map(lambda tensor: tensor[index : index + 1], lambda state: state.row(index, start, stop))
        return replace(one, length=self.length - (stop - start))

    def to(self, device: torch.device | str) -> "RecurrentState":
        """Return the state with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device), lambda state: state.to(device))

    def _map(self, on_tensor: Any, on_attention: Any) -> "RecurrentState":
        return replace(
            self,
            conv=tuple(None if tensor is None else on_tensor(tensor) for tensor in self.conv),
            recurrent=tuple(None if tensor is None else on_tensor(tensor) for tensor in self.recurrent),
            attention=None if self.attention is None else on_attention(self.attention),
        )


LayerState = AttentionState | RecurrentState | KeptState | NothingState
"""What a layer of any kind holds at a moment."""


class PrefixRecurrentLayer(LinearAttentionLayer):
    """A layer with a running state only.

    Models update the state in place, so capturing it copies. It counts the tokens of its forwards, since a model of
    such layers alone has nothing else to tell how long its prefix is.
    """

    window: int | None = None
    is_sliceable = False
    holds_keys = False
    device: Any  # Transformers declares both as None
    dtype: Any

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._tokens = 0
        self._step_begun = False  # a forward has read the state; a step of one token writes it in place, unseen

    # -- called by the cache while a forward runs --------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a forward reads the state."""
        self._tokens, self._step_begun = self._counted(), True
        self._leave_inference_mode()

    def cancel_step(self) -> None:
        """Take `begin_step` back: the forward was refused."""
        self._step_begun = False

    def update_conv_state(  # type: ignore[override]
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Add the inputs ``[rows, channels, tokens]`` of a convolution and return them behind those held."""
        self.check_rows(conv_states.shape[0])
        self._leave_inference_mode()
        rows = conv_states.shape[0]
        self._drop_other_rows(self.conv_states, self.is_conv_states_initialized, state_idx, rows)
        # Both at once: from Transformers 5.25 on, models read the recurrent state after the convolution's update.
        self._drop_other_rows(self.recurrent_states, self.is_recurrent_states_initialized, state_idx, rows)
        result: torch.Tensor = LinearAttentionLayer.update_conv_state(self, conv_states, state_idx, **kwargs)
        if state_idx == 0:
            self._tokens, self._step_begun = self._tokens + conv_states.shape[-1], False
        return result

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor | list[torch.Tensor], state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the recurrent state ``[rows, ...]`` by the one passed, or by the last of several."""
        self._leave_inference_mode()
        last = recurrent_states if isinstance(recurrent_states, torch.Tensor) else recurrent_states[-1]
        self._drop_other_rows(self.recurrent_states, self.is_recurrent_states_initialized, state_idx, last.shape[0])
        result: torch.Tensor = LinearAttentionLayer.update_recurrent_state(self, recurrent_states, state_idx, **kwargs)
        return result

    # -- the protocol of prefix layers -------------------------------------------------------------------------------

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        held = self.tensors()
        return held[0].shape[0] if held and any(self.has_previous_state.values()) else None

    def check_rows(self, rows: int) -> None:
        """Raise `BatchSizeError` unless a batch of ``rows`` continues what is held."""
        held = self.rows
        if held is not None and rows != held:
            raise BatchSizeError(
                f"the batch has {rows} rows but the cache holds {held}; fork the cache with batch_size={rows}, or "
                "select rows with batch_select_indices"
            )

    def check_room(self, added: int) -> None:
        """Accept any number of further tokens: the state does not grow."""

    def check_load(self, state: RecurrentState, rows: int) -> None:
        """Accept any state."""

    def get_seq_length(self) -> int:
        """Return the tokens seen."""
        return self._counted()

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        return self._counted()

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        held = (*self.conv_states.values(), *self.recurrent_states.values())
        return [tensor for tensor in held if tensor is not None]

    def state(self) -> RecurrentState:
        """Return what is held, uncopied: for questions, not for keeping."""
        seen = any(self.has_previous_state.values())
        return RecurrentState(
            tuple(self.conv_states.values()) if seen else (None,) * self.number_of_states,
            tuple(self.recurrent_states.values()) if seen else (None,) * self.number_of_states,
            tuple(self.conv_kernel_size.values()),
            self._counted(),
        )

    def share(self) -> RecurrentState:
        """Return a copy of what is held; keys and values beside it are the hybrid's to share."""
        return self.state()._map(torch.clone, lambda attention: attention)

    def load(self, state: RecurrentState, rows: int) -> None:
        """Copy ``state`` for a batch of ``rows``; in place, addresses kept, where shapes allow it."""
        PrefixRecurrentLayer.reset(self)
        self._tokens = state.length
        for index in range(self.number_of_states):
            self.conv_kernel_size[index] = state.widths[index]
            for held, flags, tensor in (
                (self.conv_states, self.is_conv_states_initialized, state.conv[index]),
                (self.recurrent_states, self.is_recurrent_states_initialized, state.recurrent[index]),
            ):
                if tensor is None:
                    continue
                tensor = tensor.expand(rows, *tensor.shape[1:])
                own = held[index]
                with torch.no_grad():
                    if own is not None and own.shape == tensor.shape and own.dtype == tensor.dtype:
                        own.copy_(tensor)
                    else:
                        held[index] = tensor.clone(memory_format=torch.contiguous_format)
                self.dtype, self.device = tensor.dtype, tensor.device
                flags[index] = True
                self.has_previous_state[index] = True

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept: with recording on, as far as inputs were kept."""
        removed = self._counted() - length
        if removed == 0 or length == 0:
            return removed >= 0
        if removed < 0 or not self.record_past or any(self.is_recurrent_states_initialized.values()):
            return False
        widths = [
            tensor.shape[-1] - int(self.conv_kernel_size[index] or 0)
            for index, tensor in self.conv_states.items()
            if tensor is not None
        ]
        return bool(widths) and min(widths) >= removed

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens. Ask `can_crop_to` before."""
        removed = self._counted() - length
        if length == 0:
            self.reset()
        elif self.record_past and not any(self.is_recurrent_states_initialized.values()):
            LinearAttentionLayer.crop(self, -removed)
        self._tokens, self._step_begun = length, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; `can_crop_to` says whether that is possible."""
        self.crop_to(max(0, self.seen() + tokens_to_remove))

    def reset(self) -> None:
        """Forget everything; the tensors stay where they are."""
        self._leave_inference_mode()
        with torch.no_grad():
            for held in (self.conv_states, self.recurrent_states):
                for tensor in held.values():
                    if tensor is not None and tensor.requires_grad:
                        tensor.detach_()
            LinearAttentionLayer.reset(self)
        self._tokens, self._step_begun = 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; in place where the number of rows stays."""
        for held in (self.conv_states, self.recurrent_states):
            for index, tensor in held.items():
                if tensor is None:
                    continue
                chosen = tensor.index_select(0, beam_idx.to(tensor.device))
                if chosen.shape == tensor.shape and not torch.is_grad_enabled():
                    tensor.copy_(chosen)
                else:
                    held[index] = chosen

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times in place of itself."""
        rows = self.rows
        if rows is not None:
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order."""
        rows = self.rows
        if rows is not None:
            self.reorder_cache(torch.arange(rows)[indices.cpu()])

    def unshare(self) -> None:
        """Do nothing: a running state is never shared."""

    @staticmethod
    def _drop_other_rows(held: dict[int, Any], flags: dict[int, bool], state_idx: int, rows: int) -> None:
        """Give up a tensor that a reset left behind, where the next batch has other rows: it cannot be written to."""
        tensor = held[state_idx]
        if tensor is not None and tensor.shape[0] != rows:
            held[state_idx], flags[state_idx] = None, False

    def _counted(self) -> int:
        return self._tokens + self._step_begun

    def _leave_inference_mode(self) -> None:
        if torch.is_inference_mode_enabled():
            return
        for held in (self.conv_states, self.recurrent_states):
            for index, tensor in held.items():
                if tensor is not None and tensor.is_inference():
                    held[index] = tensor.clone()
