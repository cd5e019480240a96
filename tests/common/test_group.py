"""A group as one stage sees it."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Damaged, Reject
from common.group import Group, GroupKey, concatenate, section_column
from common.section import Section, encode
from section_cases import example

pytestmark = pytest.mark.unit


def group(*names: str, rows: int = 2) -> Group:
    return Group(GroupKey("g7", 7), sections={name: encode(name, example(name, rows)) for name in names})


def test_columns_are_read_from_the_section_that_holds_them() -> None:
    seen = group("tokens", "reward")
    assert seen.values("reward_status") == ["a", "a"]
    assert [view.tolist() for view in seen.arrays("response_ids")] == [[1, 2], [1, 2]]
    assert seen.numpy("temperature").tolist() == [0.5, 0.5]


def test_a_column_whose_section_did_not_arrive_is_named_with_its_group() -> None:
    with pytest.raises(Reject, match=r"group g7: column 'ref_logprobs' needs section 'reference', which is missing"):
        group("tokens").column("ref_logprobs")


def test_the_only_value_of_a_prompt_is_read_as_one_value() -> None:
    assert group("prompt", rows=1).value("label") == "a"


def test_the_number_of_samples_comes_from_any_section_with_a_row_per_sample() -> None:
    assert group("prompt", "reward", rows=3).num_samples == 3
    with pytest.raises(Reject, match="no per-sample section is here, only"):
        _ = group("prompt", rows=1).num_samples


def test_damage_is_found_on_first_use() -> None:
    section = encode("reward", example("reward"))
    flipped = bytearray(section.data)
    flipped[-20] ^= 1
    with pytest.raises(Damaged):
        Group(GroupKey("g", 0), sections={"reward": Section(section.info, flipped)}).column("reward")


def test_every_section_has_a_column() -> None:
    assert section_column("media") == "media_hash"


@given(rows=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=5))
@settings(max_examples=40, deadline=None)
def test_arrays_become_one_list_column_and_come_back(rows: list[list[int]]) -> None:
    column = concatenate([np.array(row, dtype=np.int32) for row in rows], "int32")
    assert column.type == pa.large_list(pa.int32())
    assert column.to_pylist() == rows


def test_views_of_list_rows_share_the_sections_bytes() -> None:
    column = concatenate([np.arange(3), np.zeros(0), np.arange(5)], "int32")
    values = {**example("inputs", 3), "prompt_ids": column}
    section = encode("inputs", values)
    views = Group(GroupKey("g", 0), sections={"inputs": section}).arrays("prompt_ids")
    assert [view.tolist() for view in views] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    whole = pa.py_buffer(section.data)
    assert whole.address <= views[2].ctypes.data < whole.address + whole.size
