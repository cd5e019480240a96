"""The order of prompts is a pure function of the place in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.prompt.schedule import Schedule

pytestmark = pytest.mark.unit


@given(num_rows=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 2**62))
@settings(max_examples=50, deadline=None)
def test_every_epoch_is_a_permutation_of_all_rows_and_the_last_one_is_the_end(
    num_rows: int, epochs: int, seed: int
) -> None:
    schedule = Schedule(num_rows, epochs, seed)
    order = [schedule.row_of(seq) for seq in range(num_rows * epochs)]
    for epoch in range(epochs):
        part = [row for e, row in filter(None, order) if e == epoch]
        assert sorted(part) == list(range(num_rows))
    assert schedule.row_of(num_rows * epochs) is None
    assert schedule.row_of(num_rows * epochs + 17) is None


@given(places=st.lists(st.integers(0, 99), min_size=1, max_size=20), seed=st.integers(0, 2**62))
@settings(max_examples=30, deadline=None)
def test_the_row_does_not_depend_on_what_was_asked_before(places: list[int], seed: int) -> None:
    asked_in_turn = Schedule(7, None, seed)
    assert [asked_in_turn.row_of(p) for p in places] == [Schedule(7, None, seed).row_of(p) for p in places]


def test_ten_prompts_for_two_epochs_are_exactly_twenty_groups() -> None:
    schedule = Schedule(num_rows=10, epochs=2, seed=1)
    started = 0
    while schedule.row_of(started) is not None:
        started += 1
    assert started == 20


def test_without_an_epoch_limit_the_order_goes_on_and_differs_between_epochs_and_seeds() -> None:
    schedule = Schedule(num_rows=50, epochs=None, seed=1)
    first = [schedule.row_of(seq) for seq in range(50)]
    second = [schedule.row_of(seq) for seq in range(50, 100)]
    assert [row for _, row in filter(None, first)] != [row for _, row in filter(None, second)]
    assert schedule.row_of(50 * 10**9) is not None
    assert [Schedule(50, None, 2).row_of(seq) for seq in range(50)] != first
