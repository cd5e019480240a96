"""Tensors as bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import WireError
from common.tensor import NamedTensor, from_numpy, width

pytestmark = pytest.mark.unit

_DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
           "float64"]  # fmt: skip


@given(data=st.data(), dtype=st.sampled_from(_DTYPES))
@settings(max_examples=60, deadline=None)
def test_an_array_comes_back_equal(data: st.DataObject, dtype: str) -> None:
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
    tensor = from_numpy("w", array)
    assert (tensor.dtype, tensor.shape) == (dtype, array.shape)
    received = NamedTensor("w", tensor.dtype, tensor.shape, bytes(tensor.data)).numpy()
    np.testing.assert_array_equal(received, array)
    assert not received.flags.writeable


def test_bfloat16_travels_as_its_bits() -> None:
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)  # 1.0 and -2.0
    tensor = from_numpy("w", bits, dtype="bfloat16")
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == ("bfloat16", (1, 2), b"\x80\x3f\x00\xc0")
    np.testing.assert_array_equal(tensor.numpy(), bits)


def test_strided_and_big_endian_arrays_are_laid_out_little_endian_in_c_order() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(from_numpy("w", array.T).data) == b"\0\0\3\0\1\0\4\0\2\0\5\0"
    assert bytes(from_numpy("w", np.array([1], dtype=">i4")).data) == b"\1\0\0\0"


def test_a_contiguous_array_is_not_copied() -> None:
    array = np.arange(4, dtype=np.float32)
    view = from_numpy("w", array).numpy()
    assert view.ctypes.data == array.ctypes.data


@pytest.mark.parametrize("dtype", ["float7", "", "object", "O", "U4", "datetime64[s]", "int8,int8", "(1,", "V8"])
def test_what_is_no_number_is_refused(dtype: str) -> None:
    with pytest.raises(WireError, match="unknown dtype"):
        width(dtype)


def test_bytes_that_do_not_fit_the_shape_are_refused_with_both_numbers() -> None:
    with pytest.raises(WireError, match=r"tensor 'w': 7 bytes for float32\[2\], not 8"):
        NamedTensor("w", "float32", (2,), bytes(7))
    with pytest.raises(WireError, match="negative size"):
        NamedTensor("w", "float32", (-1, -2), bytes(8))
