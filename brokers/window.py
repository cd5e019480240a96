"""The two staleness gates: who may start a group, and which group may leave for the trainer. A pure state machine.

With `s` = max_staleness, `B` = groups_per_step, `v` = the trainer's version:

* Admission. A worker that has loaded version w may start a group while
  `outstanding < (w + s + 1 - v) * B`, where outstanding groups are started and not yet part of an update. The group's
  deadline is w + s: the last version at which it may be trained.
* Hand-out. A group may join the batch of step v only if every group that stays behind can still meet its deadline:
  for each d >= v, at most `(d - v) * B + slots left in this batch` of them are due by d. Only groups that are due
  before this one can be in danger: for later ones it takes a slot and leaves one group less behind.

Admission keeps the number of groups due by d at or below `(d - v + 1) * B`, so the B earliest are always a legal batch,
and the hand-out gate cannot deadlock. Should a group turn out older than its start said, the earliest may still leave,
and what is then too late is stale.

A group is due by its deadline, with two exceptions. `rewind`: groups of steps that the trainer makes again are due by
exactly those steps; every such step is full, so the gate itself gives it the groups that it had. `LATE`: a group that
was excused holds no credit, and leaves when it endangers no other; nothing else changes, so what is said above holds
for the rest.
"""

from collections import Counter
from collections.abc import Mapping

from common.group import PolicyVersion

LATE: PolicyVersion = 1 << 62
"""due by no step"""


class Window:
    """Credits and due steps of all groups between their start and their update."""

    def __init__(self, groups_per_step: int, max_staleness: int, total_groups: int | None = None) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.total_groups = total_groups
        self.version: PolicyVersion = 0
        self.reached: PolicyVersion = 0  # newest version that was ever made: weights of it may be in use
        self.trained = 0
        self.late = 0
        self.handed = 0  # in the batch of the current step
        self._due: Counter[PolicyVersion] = Counter()

    @property
    def waiting(self) -> int:
        """Started groups that were neither handed out nor excused."""
        return self._due.total()

    @property
    def outstanding(self) -> int:
        """Groups that hold a credit: started, and neither part of an update nor given up nor excused."""
        return self.waiting + self.handed

    @property
    def slots(self) -> int:
        """Groups that the batch of the current step still wants."""
        return self.groups_per_step - self.handed

    def credits(self, worker_version: PolicyVersion) -> int:
        """Return how many groups a worker at this version may start now; never negative.

        After a `rewind` a worker may be ahead of the trainer. Its groups have the deadline that their own version
        gives them, and the steps that are made again are taken into account on both sides: it may start what it could
        have started before.
        """
        free = (worker_version + self.max_staleness + 1 - self.version) * self.groups_per_step - self.outstanding
        if self.total_groups is not None:
            free = min(free, self.total_groups - self.trained - self.outstanding)
        return max(0, free)

    def admit(self, worker_version: PolicyVersion) -> PolicyVersion:
        """Return the deadline of a group that a worker at this version starts now; `start` takes the credit."""
        assert self.credits(worker_version) > 0, "admission is asked before a group starts"
        return worker_version + self.max_staleness

    def start(self, due: PolicyVersion) -> None:
        """Take a credit for a group."""
        self._due[due] += 1

    def give_up(self, due: PolicyVersion, *, handed: bool) -> None:
        """Return the credit of a group that will not be trained under this start."""
        if handed:
            self.handed -= 1
        else:
            self._leave(due)

    def postpone(self, old: PolicyVersion, new: PolicyVersion) -> None:
        """Let a waiting group be due by another step; by none, `LATE`, it returns its credit."""
        self._leave(old)
        self._enter(new)

    def may_leave(self, due: PolicyVersion) -> bool:
        """Whether a waiting group that is due by this step may join the batch of the current one."""
        if self.slots <= 0 or due < self.version:
            return False
        behind = 0
        for other in sorted(other for other in self._due if self.version <= other < due):
            behind += self._due[other]
            if behind > (other - self.version) * self.groups_per_step + self.slots - 1:
                return False
        return True

    def tight(self) -> tuple[PolicyVersion, int] | None:
        """Return the first step d by which so many groups are due that all slots until then are theirs, with how many.

        None if there is no such step: any group may take the next slot.
        """
        behind = 0
        for due in sorted(due for due in self._due if due >= self.version):
            behind += self._due[due]
            if behind >= (due - self.version) * self.groups_per_step + self.slots:
                return due, behind
        return None

    def hand_out(self, due: PolicyVersion) -> None:
        """Move a waiting group into the batch of the current step."""
        self._leave(due)
        self.handed += 1

    def take_back(self, due: PolicyVersion) -> None:
        """Undo `hand_out`: the trainer gave the group back."""
        self.handed -= 1
        self._enter(due)

    def advance(self, version: PolicyVersion, trained: int) -> None:
        """The trainer reached `version` with an update on `trained` groups; their credits return."""
        assert version == self.version + 1, f"version {version} does not follow {self.version}"
        assert 0 <= trained <= self.handed, "only groups that were handed out can be trained"
        self.handed -= trained
        self.trained += trained
        self.version = version
        self.reached = max(self.reached, version)

    def rewind(self, version: PolicyVersion, trained: Mapping[PolicyVersion, int]) -> None:
        """The trainer went back to `version`: the groups that it trained since, by step, are due by those steps."""
        for step, number in trained.items():
            if step < self.version:
                self.trained -= number
            else:
                self.handed -= number
            self._due[step] += number
        self.version = version

    def _enter(self, due: PolicyVersion) -> None:
        if due == LATE:
            self.late += 1
        else:
            self._due[due] += 1

    def _leave(self, due: PolicyVersion) -> None:
        if due == LATE:
            assert self.late > 0, "no group is excused"
            self.late -= 1
            return
        assert self._due[due] > 0, f"no waiting group is due by {due}"
        self._due[due] -= 1
        if not self._due[due]:
            del self._due[due]
