import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.trainer.micro import MAX_PADDING, plan

pytestmark = pytest.mark.unit


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=60),
    max_tokens=st.integers(1, 120),
)
def test_each_row_is_in_one_micro_batch_of_its_kind_and_within_the_budgets(
    rows: list[tuple[int, int]], max_tokens: int
) -> None:
    length, kind = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    batches = plan(length, kind, max_tokens)
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) > 0
        assert batch.tolist() == sorted(batch.tolist())
        assert len(batch) * length[batch].max() - length[batch].sum() <= MAX_PADDING
        assert len(set(kind[batch].tolist())) == 1
        assert len(batch) == 1 or len(batch) * length[batch].max() <= max_tokens


def test_a_micro_batch_is_closed_only_when_the_next_row_would_exceed_the_budget() -> None:
    # By length: 20 stands alone; 9 and 5 would make 2 * 9 = 18 > 12; 5 and 4 are 2 * 5 = 10, with 3 they would be 15.
    batches = plan(np.array([4, 5, 3, 9, 20, 1]), np.zeros(6, np.int64), 12)
    assert [batch.tolist() for batch in batches] == [[4], [3], [0, 1], [2, 5]]


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    # 100 + 100 + 1 would hold 99 padded positions <= 128, a further row of 1 would make 198.
    batches = plan(np.array([1, 100, 1, 100, 1]), np.zeros(5, np.int64), 10_000)
    assert [batch.tolist() for batch in batches] == [[0, 1, 3], [2, 4]]


def test_kinds_are_kept_apart_however_they_are_mixed() -> None:
    batches = plan(np.array([2, 2, 2, 2]), np.array([7, 3, 7, 3]), 100)
    assert [batch.tolist() for batch in batches] == [[0, 2], [1, 3]]


def test_no_rows_make_no_micro_batches() -> None:
    assert plan(np.zeros(0, np.int64), np.zeros(0, np.int64), 8) == []
