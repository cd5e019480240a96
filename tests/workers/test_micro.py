import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.trainer.micro import plan

pytestmark = pytest.mark.unit


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=60),
    max_tokens=st.integers(1, 120),
)
def test_each_row_is_in_one_micro_batch_of_its_kind_in_order_and_within_the_budget(
    rows: list[tuple[int, int]], max_tokens: int
) -> None:
    length, kind = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    batches = plan(length, kind, max_tokens)
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(rows)))
    for wanted in set(kind.tolist()):
        seen = [int(i) for batch in batches for i in batch if kind[i] == wanted]
        assert seen == sorted(seen)
    for batch in batches:
        assert len(batch) > 0
        assert len(set(kind[batch].tolist())) == 1
        assert len(batch) == 1 or len(batch) * length[batch].max() <= max_tokens


def test_a_micro_batch_is_closed_only_when_the_next_row_would_exceed_the_budget() -> None:
    # 2 rows of at most 5: 10 <= 12; a third row of 3 would make 3 * 5 = 15. Then 3 + 9: 2 * 9 = 18. 20 stands alone.
    batches = plan(np.array([4, 5, 3, 9, 20, 1]), np.zeros(6, np.int64), 12)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2], [3], [4], [5]]


def test_kinds_are_kept_apart_however_they_are_mixed() -> None:
    batches = plan(np.array([2, 2, 2, 2]), np.array([7, 3, 7, 3]), 100)
    assert [batch.tolist() for batch in batches] == [[0, 2], [1, 3]]


def test_no_rows_make_no_micro_batches() -> None:
    assert plan(np.zeros(0, np.int64), np.zeros(0, np.int64), 8) == []
