"""The ledger under any order of everything that can happen to it: what is always true, and that it never blocks."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from ledger_cases import ADDED, BY_NAME, PROMPT
from ledger_happenings import ORIGINAL, WORKERS, Happenings


class LedgerMachine(Happenings):
    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "bench"):
            return
        assert self.ledger.books.records.keys() == self.live.keys()
        assert self.ledger.books.leases.keys() == self.held.keys()
        counts, version = self.ledger.counts, self.ledger.window.version
        train = [known for known in self.live.values() if known.purpose == "train"]
        updated = sum(known.trained_at is not None and known.trained_at < version for known in train)
        excused = sum(known.excused for known in train)
        under_way = sum(known.oldest is not None for known in train) - updated - excused
        assert (self.ledger.window.outstanding, self.ledger.window.late) == (under_way, excused)
        ends = list(self.ended.values())
        assert counts.trained == ends.count("trained") + updated
        assert counts.dropped.total() == ends.count("dropped")
        assert counts.dead.total() == sum(end == "dead" for g, end in self.ended.items() if g.startswith("train"))
        lost = counts.dropped.total() + counts.dead.total()
        assert counts.started == under_way + excused + counts.trained + lost
        assert (counts.regenerated, counts.down_weighted) == (self.regenerated, len(self.down_weighted))
        assert counts.evaluated == ends.count("evaluated")
        assert counts.repeated == self.repeats
        reached = self.ledger.window.reached
        free = (reached + self.s + 1 - version) * self.size - under_way
        assert free >= 0
        if self.total is not None:
            free = max(0, min(free, self.total - counts.trained - under_way))
        assert self.ledger.window.credits(reached) == free

    @invariant()
    def queues_equal_a_recount(self) -> None:
        for stage, queue in self.ledger.books.queues.items() if hasattr(self, "bench") else ():
            inside = [
                group for group, known in self.live.items()
                if known.in_work_or_ready(stage) and (stage != "rollout" or known.purpose == "train")
            ]  # fmt: skip
            assert queue.groups == len(inside)
            assert queue.bytes == len(inside) * sum({**PROMPT, **ADDED}[name] for name in BY_NAME[stage].requires)

    @invariant()
    def exactly_the_sections_that_somebody_still_needs_are_kept(self) -> None:
        if not hasattr(self, "bench"):
            return
        kept: dict[tuple[str, str], int] = {}
        for group, known in self.live.items():
            needed = {name for stage in known.pending() for name in BY_NAME[stage].requires}
            if self.policy == "regenerate" and known.purpose == "train":
                needed |= ORIGINAL
            kept |= {(group, name): 1 for name in known.sections & needed}
        for grant in self.held.values():
            kept |= {(grant.lease.group, name): 1 for name in grant.lease.staged}
        assert {(g, name) for g in self.live for name in self.bench.here(g)} == kept.keys()
        assert len(self.bench.store) == len(kept)
        assert self.bench.store.bytes == sum({**PROMPT, **ADDED}[name] for _, name in kept)

    def teardown(self) -> None:
        """With workers that live, a run always comes to two more updates or to its end; then nothing is left."""
        if not hasattr(self, "bench"):
            return
        for worker in WORKERS:
            self.lose_a_worker(worker)
        goal, ledger = self.ledger.window.version + 2, self.ledger
        while ledger.window.version < goal and not ledger.exhausted:
            trained = ledger.counts.trained
            while ledger.books.queues["rollout"].groups < self.size and ledger.next_seq["train"] < 10_000:
                self.bench.add(ledger.next_seq["train"])
            self.bench.generate()
            in_hand = sum(k.trained_at == ledger.window.version for k in self.live.values())
            since = len(self.bench.events)
            grants = self.bench.lease("trainer", self.size - in_hand, at_least=self.size - in_hand)
            if len(grants) + in_hand < self.size and self.bench.decisions(since):
                continue  # those that were too old are replaced
            assert len(grants) + in_hand == self.size or ledger.exhausted, "deadlock"
            for grant in grants:
                assert ledger.window.version - grant.record.version_min <= self.s or self.policy == "down_weight"
                self.bench.ack(grant)
            ledger.advance(ledger.window.version + 1)
            assert ledger.counts.trained > trained or ledger.exhausted
        ledger.end("finished", "")
        assert (self.bench.store.bytes, len(self.bench.store), ledger.window.outstanding) == (0, 0, 0)
        assert ledger.counts.started == self.bench.ends()


LedgerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLedgerMachine = pytest.mark.unit(LedgerMachine.TestCase)
