"""Any columns of any section, as hypothesis draws them."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from common.columns import SCHEMAS

_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)
_FLOAT32 = st.floats(width=32, allow_nan=False)
_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.large_string(): st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    pa.large_binary(): st.binary(max_size=40),
    pa.int32(): _INT32,
    pa.int64(): _INT64,
    pa.float32(): _FLOAT32,
    pa.bool_(): st.booleans(),
    pa.large_list(pa.int32()): st.lists(_INT32, max_size=6),
    pa.large_list(pa.int64()): st.lists(_INT64, max_size=6),
    pa.large_list(pa.float32()): st.lists(_FLOAT32, max_size=6),
}


@st.composite
def columns(draw: st.DrawFn, section: str, min_rows: int = 0) -> dict[str, list[Any]]:
    rows = draw(st.integers(min_rows, 4))
    return {field.name: draw(st.lists(_VALUES[field.type], min_size=rows, max_size=rows)) for field in SCHEMAS[section]}


def example(section: str, rows: int = 2) -> dict[str, list[Any]]:
    """The same plain values in every row."""
    plain: dict[pa.DataType, Any] = {
        pa.large_string(): "a",
        pa.large_binary(): b"abc",
        pa.int32(): 1,
        pa.int64(): 2,
        pa.float32(): 0.5,
        pa.bool_(): True,
        pa.large_list(pa.int32()): [1, 2],
        pa.large_list(pa.int64()): [3],
        pa.large_list(pa.float32()): [0.25, np.float32(1.5)],
    }
    return {field.name: [plain[field.type]] * rows for field in SCHEMAS[section]}
