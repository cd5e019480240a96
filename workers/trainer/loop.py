"""The trainer loop: groups become gradients as they arrive, a complete batch becomes an update, an update a version.

for each step v: lease groups that may be trained at v -> accumulate -> update -> ack -> advance -> publish v + 1
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from brokers.client import Leased, SampleClient
from brokers.weight_client import WeightClient
from common.errors import Reject, WorkerError
from common.settings import Config
from workers import stage
from workers.stage import Stage
from workers.trainer.backend import Backend
from workers.trainer.evaluation import Evaluations
from workers.trainer.report import RunReport, StepReport

WAIT_SECONDS = 1.0
INLINE_SECONDS = 0.02
"""how long a lease waits when this process serves other stages too (hybrid)"""
INLINE_GROUPS = 16
EVALUATION_GROUPS = 256


class Trainer:
    """One trainer. `inline`: stages that run in this process (hybrid), by name."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        client: SampleClient,
        weights: WeightClient,
        report: RunReport,
        inline: Sequence[tuple[str, Stage]] = (),
    ) -> None:
        self._config, self._backend, self._client = config, backend, client
        self._weights, self._report, self._inline = weights, report, inline
        self._evaluations = Evaluations(config.evaluation.solved_at)
        self._piece = max(1, config.groups_per_step // config.micro_steps)
        self._asked = 0
        self._added = 0  # groups whose gradients were taken, ever
        self._fence = 0
        self._log = structlog.get_logger(part="trainer")

    def run(self, over: Callable[[], bool]) -> str:
        """Train until the steps are done, the data ends or `over()`; return `finished` or `stopped`."""
        every = self._config.evaluation.every
        if self._config.mode == "sync":
            self._backend.offload()  # the first turn is not ours
        self._evaluate(0)
        self._wait_for_evaluations(over)
        version = 0
        while self._config.steps is None or version < self._config.steps:
            if over():
                return "stopped"
            if not self._step(version, over):
                break
            version += 1
            if every and version % every == 0 and version != self._config.steps:
                self._evaluate(version)
        if over():
            return "stopped"
        self._evaluate(version)
        self._wait_for_evaluations(over)
        return "finished"

    def _step(self, version: int, over: Callable[[], bool]) -> bool:
        """Make the update `version` -> `version + 1`; False if no group is left to make it with."""
        report, trained = StepReport(version), list[Leased]()
        while len(trained) < self._config.groups_per_step and not over():
            self._take_turn(over)
            began = time.monotonic()
            want = self._config.groups_per_step - len(trained)
            seconds = INLINE_SECONDS if self._serve_inline() or self._inline else WAIT_SECONDS
            batch = self._client.lease("trainer", want, seconds, version, at_least=self._piece)
            report.waited(time.monotonic() - began)
            if batch.ended or batch.starved == "no more groups":
                break
            trained += self._accumulate(batch.leases)
            self._collect_evaluations()
            if not batch.leases and not self._inline:
                self._give_turn()  # a group may have to be generated anew before this batch can be complete
        if not trained or over():
            return False
        metrics = self._backend.update()
        self._client.ack(trained, step=version)
        self._client.advance(version + 1)
        tensors = list(self._backend.weights())
        self._client.channel.pulse.report(updates=version + 1, waits_for="weight broker")
        sent = self._weights.publish(version + 1, tensors, self._config.weights.chunk_bytes)
        self._client.channel.pulse.report(waits_for="")
        self._give_turn()
        self._client.commit(version + 1)
        report.add(trained)
        self._tell(report.row({**metrics, "weight_bytes": float(sent)}))
        return True

    def _accumulate(self, leases: Sequence[Leased]) -> list[Leased]:
        """Add the gradients of these groups; return those that were added, the others are given back.

        A deterministic run adds group by group: sums must not depend on which groups happened to arrive together.
        """
        if not leases:
            return []
        if self._config.deterministic and len(leases) > 1:
            return [added for leased in leases for added in self._accumulate([leased])]
        try:
            self._backend.accumulate([leased.group for leased in leases])
        except Reject as error:
            if len(leases) == 1:
                self._client.nack(leases, error.reason)
                return []
            return [added for leased in leases for added in self._accumulate([leased])]
        self._added += len(leases)
        self._client.channel.pulse.report(groups=self._added)
        return list(leases)

    def _serve_inline(self) -> bool:
        """Handle what waits for the stages of this process; True if there was something."""
        busy = False
        for name, inline in self._inline:
            batch = self._client.lease(name, INLINE_GROUPS, 0.0)
            results = stage.answer(inline, batch.leases, self._client)
            if results:
                self._client.confirm(self._client.put(results), results)
                busy = True
        return busy

    def _evaluate(self, version: int) -> None:
        if self._config.evaluation.prompts:
            self._client.evaluate(version)
            self._asked += 1

    def _collect_evaluations(self) -> None:
        while self._evaluations.done < self._asked:
            batch = self._client.lease("evaluate", EVALUATION_GROUPS, 0.0)
            if not batch.leases:
                return
            self._client.ack(batch.leases)
            for row in self._evaluations.collect(batch.leases):
                self._report.write(row)
                self._client.channel.pulse.report(heldout=row["heldout"], heldout_version=row["version"])
                self._log.info("evaluated", version=row["version"], heldout=round(row["heldout"], 4))

    def _wait_for_evaluations(self, over: Callable[[], bool]) -> None:
        """Wait for the held-out answers; raises `WorkerError` after `evaluation.deadline_seconds` without them."""
        until = time.monotonic() + self._config.evaluation.deadline_seconds
        while self._evaluations.done < self._asked and not over():
            self._collect_evaluations()
            self._take_turn(over, wait_seconds=0.0)
            self._give_turn()
            self._client.lease("evaluate", 0, 0.05)
            if time.monotonic() > until:
                missing = self._asked - self._evaluations.done
                raise WorkerError(
                    f"{missing} evaluations incomplete after evaluation.deadline_seconds = "
                    f"{self._config.evaluation.deadline_seconds:g}: do prompt, rollout and reward workers run?"
                )

    def _take_turn(self, over: Callable[[], bool], wait_seconds: float = WAIT_SECONDS) -> None:
        """In sync mode, wait until the device is this side's; otherwise nothing."""
        while self._config.mode == "sync" and not self._fence and not over():
            self._fence = self._client.take_turn("trainer", wait_seconds)
            if self._fence:
                self._backend.reload()
            if not wait_seconds:
                return

    def _give_turn(self) -> None:
        if self._fence:
            self._backend.offload()
            self._client.give_turn("trainer", self._fence)
            self._fence = 0

    def _tell(self, row: dict[str, Any]) -> None:
        self._report.write(row)
        shown = ("step", "reward", "staleness_max", "samples_per_s", "step_s", "wait_s")
        self._client.channel.pulse.report(**{name: row[name] for name in shown}, steps=self._config.steps)
        self._log.info("step", **{name: round(row[name], 4) for name in shown}, loss=round(row["loss"], 5))
