"""The key-value cache of all running rows: one window of columns, rows aligned at its right end.

Every row's last token stands in the last column, so one slice takes the next token of all rows, and distances between
columns are distances between tokens, which sliding-window masks count on. A row shorter than the window has pad columns
on its left; they hold finite numbers (0 times NaN would be NaN) and are masked.
Shapes: R rows, H key-value heads, T tokens, D head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_STEP = 64
"""Columns made ready at a time: moving the window then costs less than what attention reads of it meanwhile."""


@dataclass(slots=True)
class _Window:
    rows: int = 0
    start: int = 0
    end: int = 0


class _Layer(CacheLayerMixin):
    """Keys and values [rows, H, columns, D] of one layer, of which `window` is in use."""

    is_sliding = False

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002  (transformers')
        raise AssertionError("rows are inserted before the first token is decoded")

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        window, stores = self.window, self.stores()
        end = window.end + key_states.shape[2]
        for store, states in zip(stores, (key_states, value_states), strict=True):
            store[: window.rows, :, window.end : end] = states
        keys, values = (store[: window.rows, :, window.start : end] for store in stores)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        return -1

    def stores(self) -> tuple[Tensor, Tensor]:
        """Keys and values with all their spare rows and columns."""
        return _filled(self)


class RowCache:
    """Keys and values of the running rows, at most `max_rows`; `cache` is what the model's forward pass takes."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.clear()

    def clear(self) -> None:
        """Give all memory back; no row is left."""
        self._window = _Window()
        self._layers: list[_Layer] = []
        self._first_R: Tensor | None = None
        self._is_padded = False
        self.cache = Cache(layers=[])

    def insert(self, prefilled: Cache, source_R: Tensor, length_R: Tensor, ahead: int) -> None:
        """Append rows copied from `prefilled`, the right-padded keys and values of a prefill.

        `source_R`: row of `prefilled` to copy; `length_R`: its real columns; `ahead`: tokens that will be decoded at
        most.
        """
        longest = int(length_R.max())
        self._reserve(prefilled, len(source_R), longest, min(ahead, _STEP))
        window = self._window
        rows, columns = slice(window.rows, window.rows + len(source_R)), slice(window.end - longest, window.end)
        index_RT = (length_R - longest)[:, None] + torch.arange(longest, device=length_R.device)
        index_R1T1 = index_RT.clamp(min=0)[:, None, :, None]
        is_ragged = bool((index_RT[:, 0] < 0).any())
        for layer, new in zip(self._layers, prefilled.layers, strict=True):
            for store, states in zip(layer.stores(), _filled(new), strict=True):
                states_RHTD = states[source_R]
                if is_ragged:
                    states_RHTD = states_RHTD.gather(2, index_R1T1.expand(-1, states.shape[1], -1, states.shape[3]))
                store[rows, :, columns] = states_RHTD[:, :, :longest]
        window.rows = rows.stop
        first_R = window.end - length_R
        self._set_first(first_R if self._first_R is None else torch.cat([self._first_R, first_R]))

    def make_room(self) -> None:
        """Make sure that the next token has a column."""
        if self._window.end == self._layers[0].stores()[0].shape[2]:
            self._move(self._window.rows, self._window.end - self._window.start, _STEP)

    def advance(self) -> None:
        """Count the column that a forward pass just wrote."""
        self._window.end += 1

    def mask(self) -> Tensor | None:
        """Return bool [R, columns + 1]: what the next token may see of the window and itself; None for all."""
        if self._first_R is None or not self._is_padded:
            return None
        column_T = torch.arange(self._window.start, self._window.end + 1, device=self._first_R.device)
        return column_T >= self._first_R[:, None]

    def keep(self, into_R: Tensor, from_R: Tensor, rows: int) -> None:
        """Copy rows `from_R` over rows `into_R`, then keep the first `rows`."""
        assert self._first_R is not None
        window = self._window
        for layer in self._layers:
            for store in layer.stores():
                used = store[:, :, window.start : window.end]
                used[into_R] = used[from_R]
        self._first_R[into_R] = self._first_R[from_R]
        window.rows = rows
        self._set_first(self._first_R[:rows] if rows else None)

    def _set_first(self, first_R: Tensor | None) -> None:
        """Take the first real column of each row; columns that no row fills any more leave the window."""
        self._first_R = first_R
        if first_R is not None:
            first, last = torch.stack([first_R.min(), first_R.max()]).tolist()
            self._window.start, self._is_padded = first, first < last

    def _reserve(self, prefilled: Cache, count: int, left: int, ahead: int) -> None:
        """Make sure of `count` more rows, and of `left` columns up to the window's end and one behind it."""
        window = self._window
        if not self._layers:
            self._layers = [_Layer(window) for _ in prefilled.layers]
            for layer, new in zip(self._layers, prefilled.layers, strict=True):
                layer.keys, layer.values = (s.new_zeros(0, s.shape[1], 0, s.shape[3]) for s in _filled(new))
            self.cache = Cache(layers=[*self._layers])
        if window.rows == 0:
            window.start = window.end = left
        capacity, columns = self._layers[0].stores()[0].shape[0::2]
        rows = window.rows + count
        if rows > capacity or window.end >= columns or left > window.end:
            spare = min(2 * window.rows, self._max_rows)
            self._move(max(rows, spare), max(left, window.end - window.start), ahead)

    def _move(self, rows: int, end: int, ahead: int) -> None:
        """Move the window into new memory of `rows` rows, ending at column `end` with `ahead` columns behind it."""
        window = self._window
        old, new = slice(window.start, window.end), slice(end - (window.end - window.start), end)
        for layer in self._layers:
            moved: list[Tensor] = []
            for store in layer.stores():
                capacity, heads, _, width = store.shape
                moved.append(store.new_zeros(max(rows, capacity), heads, end + max(ahead, 1), width))
                moved[-1][: window.rows, :, new] = store[: window.rows, :, old]
            layer.keys, layer.values = moved
        if self._first_R is not None:
            self._first_R = self._first_R + (new.start - old.start)
        window.start, window.end = new.start, new.stop


def _filled(layer: object) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, CacheLayerMixin)
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values
