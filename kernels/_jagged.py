"""Packed rows: validation of offsets, the layout they describe, and the way to a padded tensor and back.

Offsets are checked once per tensor and version: the checks read values, which on a GPU waits for the device, and the
same offsets usually serve every layer of a model. What follows from them (lengths, row of each entry, ...) is kept with
the check.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import cached_property
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Layout", "layout_of", "lengths_of", "pad", "row_ids", "unpad", "validate_offsets"]

T = TypeVar("T")


class Layout:
    """What a valid offsets tensor says, with everything derived from it computed at most once.

    Attributes:
        offsets: the offsets, int64 [B+1].
        lengths: entries per row, int64 [B].
        num_rows: B.
        total: number of packed entries, `offsets[-1]`.
        max_len: longest row, 0 without rows.
        memo: what schedules and plans derived from this layout, per layout that it was paired with.
    """

    def __init__(self, offsets: Tensor, total: int, max_len: int) -> None:
        """Keep the numbers that a validation has read; use `layout_of` to build one from untrusted offsets."""
        self.offsets = offsets
        self.lengths = offsets.diff()
        self.num_rows = offsets.numel() - 1
        self.total = total
        self.max_len = max_len
        self.memo: MutableMapping[Layout, dict[tuple[object, ...], Any]] = WeakKeyDictionary()
        self._blocks: dict[int, Blocks] = {}

    @property
    def is_uniform(self) -> bool:
        """Whether the padded form holds nothing but entries, so that it is a view and needs no mask."""
        return self.total == self.num_rows * self.padded_len

    @cached_property
    def row(self) -> Tensor:
        """The row of each packed entry, int64 [total]."""
        rows_B = torch.arange(self.num_rows, device=self.offsets.device)
        return torch.repeat_interleave(rows_B, self.lengths, output_size=self.total)

    @cached_property
    def position(self) -> Tensor:
        """The position of each packed entry in its row, int64 [total]."""
        entries_N = torch.arange(self.total, device=self.offsets.device)
        return entries_N - self.offsets[self.row]

    @cached_property
    def padded_len(self) -> int:
        """Row length of the padded form: at least 1, so that an all-empty batch needs no special case."""
        return max(self.max_len, 1)

    @cached_property
    def padded_index(self) -> Tensor:
        """Where each packed entry lies in the flattened padded form, int64 [total]."""
        return self.row * self.padded_len + self.position

    @cached_property
    def mask(self) -> Tensor:
        """True where the padded form holds an entry, bool [B, padded_len]."""
        positions_L = torch.arange(self.padded_len, device=self.offsets.device)
        return positions_L < self.lengths[:, None]

    def copy(self) -> Layout:
        """The same layout under a new object with an empty memo."""
        return Layout(self.offsets, self.total, self.max_len)

    def select(self, rows: Tensor) -> Layout:
        """The layout of some rows, int64 [b], packed in this order."""
        lengths = self.lengths[rows]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Layout(offsets, int(offsets[-1]), int(lengths.max()) if rows.numel() else 0)

    def blocks(self, block_size: int) -> Blocks:
        """The finer layout in which every run of `block_size` entries of a row is a row of its own.

        Blocks restart at each row's start, so the last block of a row may be shorter; empty rows have no block.
        """
        if block_size not in self._blocks:
            per_row_B = (self.lengths + block_size - 1) // block_size
            first_B = per_row_B.cumsum(0) - per_row_B
            row_T = torch.repeat_interleave(torch.arange(self.num_rows, device=per_row_B.device), per_row_B)
            index_T = torch.arange(row_T.numel(), device=per_row_B.device) - first_B[row_T]
            start_T = index_T * block_size
            offsets = torch.cat([self.offsets[row_T] + start_T, self.offsets[-1:]])
            self._blocks[block_size] = Blocks(offsets, self.total, min(self.max_len, block_size), row_T, start_T)
        return self._blocks[block_size]


class Blocks(Layout):
    """A layout whose rows are blocks of the rows of another one.

    Attributes:
        parent_row: row of each block in the coarser layout, int64 [T].
        parent_start: its first entry, counted from that row's start, int64 [T].
    """

    def __init__(self, offsets: Tensor, total: int, max_len: int, parent_row: Tensor, parent_start: Tensor) -> None:
        """Keep where each block comes from."""
        super().__init__(offsets, total, max_len)
        self.parent_row = parent_row
        self.parent_start = parent_start


class Remembered(Generic[T]):
    """What was derived from a tensor, kept while the tensor lives and is not written to.

    Inference mode has its own table: tensors made there cannot take part in a backward pass later.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._tables: dict[bool, MutableMapping[Tensor, tuple[tuple[int, ...], T]]] = {
            False: WeakTensorKeyDictionary(),
            True: WeakTensorKeyDictionary(),
        }

    def get(self, tensor: Tensor, make: Callable[[], T], *parameters: int) -> T:
        """The value made for this version of `tensor` with these parameters, made now if it is not known."""
        if tensor.is_inference():
            return make()  # such a tensor counts no versions
        table = self._tables[torch.is_inference_mode_enabled()]
        key = (tensor._version, *parameters)
        known = table.get(tensor)
        if known is None or known[0] != key:
            known = table[tensor] = (key, make())
        return known[1]


_layouts: Remembered[Layout] = Remembered()


def layout_of(offsets: Tensor, num_packed: int, *, name: str = "offsets") -> Layout:
    """Validate offsets against a packed tensor of `num_packed` entries and return their layout.

    Args:
        offsets: int64 [B+1], from 0, never falling.
        num_packed: leading size of the packed tensor; entries past `offsets[-1]` are allowed.
        name: how the caller calls the offsets, for the error text.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, first value, order, or a last value beyond `num_packed`.
    """
    layout = _layouts.get(offsets, lambda: _read(offsets, name))
    if layout.total > num_packed:
        raise ValueError(
            f"{name}: row {layout.num_rows - 1} ends at {layout.total}, expected at most {num_packed} "
            "(the number of packed entries)"
        )
    return layout


def _read(offsets: Tensor, name: str) -> Layout:
    if offsets.dtype != torch.int64:
        raise TypeError(f"{name}: expected dtype torch.int64, found {offsets.dtype}")
    if offsets.ndim != 1 or offsets.numel() < 1:
        raise ValueError(f"{name}: expected shape [B+1] with B >= 0, found {list(offsets.shape)}")
    lengths = offsets.diff()
    # One transfer for all three numbers: on a GPU each would wait for the device.
    smallest = lengths.min() if lengths.numel() else offsets.new_zeros(())
    largest = lengths.max() if lengths.numel() else offsets.new_zeros(())
    first, last, low, high = torch.stack([offsets[0], offsets[-1], smallest, largest]).tolist()
    if first != 0:
        raise ValueError(f"{name}: row 0 starts at {first}, expected 0")
    if low < 0:
        row = int((lengths < 0).nonzero()[0, 0])
        raise ValueError(
            f"{name}: row {row} ends at {int(offsets[row + 1])}, expected at least its start {int(offsets[row])}"
        )
    # detach() shares the data under a new object, so that the weak table below does not keep its own key alive.
    return Layout(offsets.detach(), last, high)


def validate_offsets(offsets: Tensor, num_packed: int, *, name: str = "offsets") -> None:
    """Raise, naming row, expected and found, unless `offsets` describes rows of `num_packed` entries."""
    layout_of(offsets, num_packed, name=name)


def lengths_of(offsets: Tensor) -> Tensor:
    """Entries per row, int64 [B], from offsets [B+1]."""
    return offsets.diff()


def row_ids(offsets: Tensor, num_packed: int) -> Tensor:
    """The row of each packed entry, int64 [num_packed]; -1 for entries past the last offset."""
    layout = layout_of(offsets, num_packed)
    return torch.nn.functional.pad(layout.row, (0, num_packed - layout.total), value=-1)


def pad(x_N: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Spread packed rows over a padded tensor; differentiable.

    Args:
        x_N: packed entries [N, ...].
        offsets: int64 [B+1].

    Returns:
        The padded tensor [B, L, ...], zero where no entry lies, with L = max(1, longest row), and its mask, bool [B,
        L].
    """
    layout = layout_of(offsets, x_N.shape[0])
    return pad_layout(x_N, layout), layout.mask


def unpad(x_BL: Tensor, offsets: Tensor, num_packed: int | None = None) -> Tensor:
    """The inverse of `pad`: packed entries [num_packed, ...] of a padded tensor [B, L, ...]; differentiable.

    Entries past the last offset are zero. `num_packed` defaults to `offsets[-1]`.

    Raises:
        ValueError: the padded tensor does not have the shape that `pad` gives for these offsets.
    """
    layout = layout_of(offsets, num_packed if num_packed is not None else torch.iinfo(torch.int64).max)
    if x_BL.shape[:2] != (layout.num_rows, layout.padded_len):
        raise ValueError(
            f"x_BL: expected leading shape [{layout.num_rows}, {layout.padded_len}], found {list(x_BL.shape[:2])}"
        )
    return unpad_layout(x_BL, layout, layout.total if num_packed is None else num_packed)


def pad_layout(x_N: Tensor, layout: Layout) -> Tensor:
    """`pad` for a known layout; returns the padded tensor alone."""
    out: Tensor = _Pad.apply(x_N, layout)  # type: ignore[no-untyped-call]
    return out


def unpad_layout(x_BL: Tensor, layout: Layout, num_packed: int) -> Tensor:
    """`unpad` for a known layout."""
    out: Tensor = _Unpad.apply(x_BL, layout, num_packed)  # type: ignore[no-untyped-call]
    return out


def _spread(x_N: Tensor, layout: Layout) -> Tensor:
    shape = (layout.num_rows, layout.padded_len, *x_N.shape[1:])
    if layout.is_uniform:
        return x_N[: layout.total].reshape(shape)
    flat = x_N.new_zeros((shape[0] * shape[1], *shape[2:]))
    flat[layout.padded_index] = x_N[: layout.total]
    return flat.view(shape)


def _collect(x_BL: Tensor, layout: Layout, num_packed: int) -> Tensor:
    flat = x_BL.flatten(0, 1)
    entries_N = flat if layout.is_uniform else flat.index_select(0, layout.padded_index)
    if num_packed == layout.total:
        return entries_N
    return torch.cat([entries_N, entries_N.new_zeros((num_packed - layout.total, *x_BL.shape[2:]))])


class _Pad(torch.autograd.Function):
    """Scatter to padded; its adjoint is the gather of `_Unpad`: faster than the index_add autograd would use."""

    @staticmethod
    def forward(ctx, x_N: Tensor, layout: Layout) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.layout, ctx.num_packed = layout, x_N.shape[0]
        return _spread(x_N, layout)

    @staticmethod
    def backward(ctx, grad_BL: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return unpad_layout(grad_BL, ctx.layout, ctx.num_packed), None


class _Unpad(torch.autograd.Function):
    """Gather from padded; its adjoint is the scatter of `_Pad`."""

    @staticmethod
    def forward(ctx, x_BL: Tensor, layout: Layout, num_packed: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.layout = layout
        return _collect(x_BL, layout, num_packed)

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return pad_layout(grad_N, ctx.layout), None, None
