"""The two staleness gates: who may start a group, and which group may leave for the trainer. A pure state machine.

With `s` = max_staleness, `B` = groups_per_step, `v` = the trainer's version:

* Admission. A worker that has loaded version w may start a group while
  `outstanding < (w + s + 1 - v) * B`, where outstanding groups are started and not yet part of an update. The group's
  deadline is w + s: the last version at which it may be trained.
* Hand-out. A group may join the batch of step v only if every group that stays behind can still meet its deadline:
  for each d >= v, at most `(d - v) * B + slots left in this batch` of them have a deadline <= d. Only deadlines before
  the group's own can be in danger: for later ones it takes a slot and leaves one group less behind.

Admission keeps the number of groups with a deadline <= d at or below `(d - v + 1) * B`, so the B earliest deadlines are
always a legal batch, and the hand-out gate cannot deadlock. Should a group turn out older than its start said, the
earliest deadline may still leave, and what is then too late is stale.
"""

from collections import Counter

from common.group import PolicyVersion


class Window:
    """Credits and deadlines of all groups between their start and their update."""

    def __init__(self, groups_per_step: int, max_staleness: int, total_groups: int | None = None) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.total_groups = total_groups
        self.version: PolicyVersion = 0
        self.trained = 0
        self._waiting: Counter[PolicyVersion] = Counter()
        self._handed = 0

    @property
    def outstanding(self) -> int:
        """Groups that hold a credit: started, and neither part of an update nor given up."""
        return self._waiting.total() + self._handed

    @property
    def waiting(self) -> int:
        """Started groups that were not handed out."""
        return self._waiting.total()

    @property
    def slots(self) -> int:
        """Groups that the batch of the current step still wants."""
        return self.groups_per_step - self._handed

    def credits(self, worker_version: PolicyVersion) -> int:
        """Return how many groups a worker at this version may start now; never negative."""
        free = (worker_version + self.max_staleness + 1 - self.version) * self.groups_per_step - self.outstanding
        if self.total_groups is not None:
            free = min(free, self.total_groups - self.trained - self.outstanding)
        return max(0, free)

    def start(self, worker_version: PolicyVersion) -> PolicyVersion:
        """Take a credit and return the group's deadline."""
        assert self.credits(worker_version) > 0, "admission is asked before a group starts"
        deadline = worker_version + self.max_staleness
        self._waiting[deadline] += 1
        return deadline

    def resume(self, deadline: PolicyVersion) -> None:
        """Take the credit of a group that was started before; the gate was asked then."""
        self._waiting[deadline] += 1

    def give_up(self, deadline: PolicyVersion, *, handed: bool) -> None:
        """Return the credit of a group that will not be trained under this start."""
        if handed:
            self._handed -= 1
        else:
            self._forget(deadline)

    def postpone(self, old: PolicyVersion, new: PolicyVersion) -> None:
        """Replace the deadline of a waiting group, whose oldest span turned out to be of another version."""
        self._forget(old)
        self._waiting[new] += 1

    def may_leave(self, deadline: PolicyVersion) -> bool:
        """Whether a waiting group with this deadline may join the batch of the current step."""
        if self.slots <= 0 or deadline < self.version:
            return False
        behind = 0
        for other in sorted(other for other in self._waiting if self.version <= other < deadline):
            behind += self._waiting[other]
            if behind > (other - self.version) * self.groups_per_step + self.slots - 1:
                return False
        return True

    def hand_out(self, deadline: PolicyVersion) -> None:
        """Move a waiting group into the batch of the current step."""
        self._forget(deadline)
        self._handed += 1

    def take_back(self, deadline: PolicyVersion) -> None:
        """Undo `hand_out`: the trainer gave the group back."""
        self._handed -= 1
        self._waiting[deadline] += 1

    def advance(self, version: PolicyVersion, trained: int) -> None:
        """The trainer reached `version` with an update on `trained` groups; their credits return."""
        assert version == self.version + 1, f"version {version} does not follow {self.version}"
        assert 0 <= trained <= self._handed, "only groups that were handed out can be trained"
        self._handed -= trained
        self.trained += trained
        self.version = version

    def _forget(self, deadline: PolicyVersion) -> None:
        assert self._waiting[deadline] > 0, f"no waiting group has the deadline {deadline}"
        self._waiting[deadline] -= 1
        if not self._waiting[deadline]:
            del self._waiting[deadline]
