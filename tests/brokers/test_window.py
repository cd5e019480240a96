"""The two staleness gates alone, under any order of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokers.window import Window

pytestmark = pytest.mark.unit


@dataclass(slots=True)
class Group:
    """A started group; `done`: every stage before the trainer is through with it."""

    deadline: int
    oldest: int
    done: bool = False


@dataclass(slots=True)
class Run:
    """Everything that can happen between the broker, rollout workers of any age, and one trainer."""

    window: Window
    waiting: list[Group] = field(default_factory=list)
    handed: list[Group] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def start(self, worker_version: int) -> bool:
        if self.window.credits(worker_version) == 0:
            return False
        deadline = self.window.admit(worker_version)
        self.window.start(deadline)
        self.waiting.append(Group(deadline, worker_version))
        return True

    def ready(self) -> list[Group]:
        return sorted((group for group in self.waiting if group.done), key=lambda group: group.deadline)

    def hand_out(self) -> bool:
        """Hand out the ready group with the earliest deadline, if the gate lets it."""
        ready = self.ready()
        if not ready or not self.window.may_leave(ready[0].deadline):
            return False
        self.window.hand_out(ready[0].deadline)
        self.waiting.remove(ready[0])
        self.handed.append(ready[0])
        return True

    def update(self) -> None:
        self.staleness += [self.window.version - group.oldest for group in self.handed]
        self.window.advance(self.window.version + 1, len(self.handed))
        self.handed.clear()

    def give_up(self, place: int) -> None:
        group = self.waiting.pop(place % len(self.waiting))
        self.window.give_up(group.deadline, handed=False)

    def take_back(self, place: int) -> None:
        group = self.handed.pop(place % len(self.handed))
        self.window.take_back(group.deadline)
        self.waiting.append(group)

    def settle(self) -> None:
        """Do what is left to do, as live workers would: finish, hand out, update, start. Fails on a deadlock."""
        steps, size = self.window.version + 3, self.window.groups_per_step
        while self.window.version < steps:
            for group in self.waiting:
                group.done = True
            while self.hand_out():
                pass
            if len(self.handed) == size:
                self.update()
                continue
            assert self.start(self.window.version), f"deadlock: {self}"


_EVENTS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 5)),
    st.tuples(st.just("start"), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("hand_out"), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.just("restart"), st.integers(0, 30)),
    st.tuples(st.just("take_back"), st.integers(0, 30)),
)


def apply(run: Run, event: str, number: int, s: int) -> None:
    if event == "start":  # by a worker that lags up to one version more than it may
        run.start(max(0, run.window.version - number % (s + 2)))
    elif event == "finish" and run.waiting:
        run.waiting[number % len(run.waiting)].done = True
    elif event == "hand_out":
        run.hand_out()
        if len(run.handed) == run.window.groups_per_step:
            run.update()
    elif event == "drop" and run.waiting:
        run.give_up(number)
    elif event == "restart" and run.waiting:
        run.give_up(number)
        run.start(run.window.version)
    elif event == "take_back" and run.handed:
        run.take_back(number)


@given(s=st.integers(0, 4), size=st.integers(1, 5), events=st.lists(_EVENTS, max_size=80))
@settings(max_examples=250, deadline=None)
def test_no_group_is_trained_older_than_allowed_no_credit_is_lost_and_nothing_blocks(
    s: int, size: int, events: list[tuple[str, int]]
) -> None:
    run = Run(Window(size, s))
    for event, number in events:
        apply(run, event, number, s)
        window = run.window
        assert window.outstanding == len(run.waiting) + len(run.handed)
        assert window.credits(window.version) == (s + 1) * size - window.outstanding  # never negative at w = v
        for d in range(window.version, window.version + s + 1):  # the earliest deadlines always fit their steps
            due = sum(group.deadline <= d for group in (*run.waiting, *run.handed))
            assert due <= (d - window.version + 1) * size
    run.settle()
    assert all(0 <= age <= s for age in run.staleness)


@given(size=st.integers(1, 3), s=st.integers(0, 2), older=st.lists(st.integers(0, 4), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_groups_that_turn_out_older_than_their_start_said_do_not_block_the_rest(
    size: int, s: int, older: list[int]
) -> None:
    run = Run(Window(size, s))
    for step in range(4):
        while run.start(run.window.version):
            pass
        for group, by in zip(run.waiting, older, strict=False):
            new = max(0, group.deadline - by)
            run.window.postpone(group.deadline, new)
            group.deadline, group.oldest = new, max(0, group.oldest - by)
        for group in run.waiting:
            group.done = True
        while True:
            stale = [group for group in run.waiting if group.deadline < run.window.version]
            for group in stale:  # what the ledger drops as stale
                run.give_up(run.waiting.index(group))
            if not run.hand_out() and not run.start(run.window.version):
                break
            for group in run.waiting:
                group.done = True
        assert len(run.handed) == size, f"step {step} is blocked: {run}"
        run.update()


def test_rollout_stops_after_exactly_the_window_when_nothing_is_trained() -> None:
    # s = 2, B = 3: (2 + 1) x 3 = 9 groups, whatever queue they stand in
    run = Run(Window(3, 2))
    started = 0
    while run.start(0):
        run.waiting[-1].done = started % 2 == 0
        started += 1
    assert started == 9
    assert run.window.credits(0) == 0


def test_at_staleness_zero_one_step_is_started_and_three_steps_train_twelve_groups() -> None:
    run = Run(Window(4, 0))
    for step in range(3):
        started = 0
        while run.start(step):
            run.waiting[-1].done = True
            started += 1
        assert started == 4
        assert not run.start(step - 1)  # a worker that lags gets nothing
        while run.hand_out():
            pass
        run.update()
    assert run.window.trained == 12
    assert run.staleness == [0] * 12


def test_a_worker_that_lags_too_far_is_starved_by_the_numbers() -> None:
    # B = 2, s = 1, v = 3: w = 3 may start while outstanding < (3 + 1 + 1 - 3) x 2 = 4, w = 2 while < 2, w = 1 while < 0
    window = Window(2, 1)
    for version in (1, 2, 3):
        window.advance(version, 0)
    assert [window.credits(w) for w in (3, 2, 1)] == [4, 2, 0]
    window.start(4)
    assert [window.credits(w) for w in (3, 2, 1)] == [3, 1, 0]


def test_a_fast_young_group_cannot_push_two_slow_old_ones_onto_one_step() -> None:
    # B = 1, s = 1: the two started at version 0 are due at version 1 at the latest, so one of them must be step 0.
    run = Run(Window(1, 1))
    assert run.start(0)
    assert run.start(0)
    assert not run.start(0)
    run.waiting[1].done = True
    assert run.hand_out()  # either of the two
    run.update()
    assert run.start(1)  # due at 2, and fast
    run.waiting[-1].done = True
    assert not run.hand_out()  # the slow one is due now
    run.waiting[0].done = True
    assert run.hand_out()
    run.update()
    assert run.hand_out()
    run.update()
    assert run.staleness == [0, 1, 1]


def test_a_run_with_an_end_starts_no_group_beyond_it_but_replaces_a_dropped_one() -> None:
    # 2 steps of 2 groups, s = 3: the window would let 8 run
    window = Window(2, 3, total_groups=4)
    for _ in range(4):
        window.start(window.admit(0))
    assert window.credits(0) == 0
    window.give_up(3, handed=False)
    assert window.credits(0) == 1
    window.hand_out(3)
    window.hand_out(3)
    window.advance(1, 2)
    assert (window.trained, window.outstanding, window.credits(1)) == (2, 1, 1)


def test_mistakes_of_ours_are_assertions() -> None:
    window = Window(1, 0)
    window.start(0)
    with pytest.raises(AssertionError):
        window.admit(0)
    with pytest.raises(AssertionError):
        window.advance(2, 0)
    with pytest.raises(AssertionError):
        window.advance(1, 1)
    with pytest.raises(AssertionError):
        window.give_up(7, handed=False)
