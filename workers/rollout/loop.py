"""The rollout loop: follow the weights, lease while the engine has room, step, push what finished.

Nothing here waits while the engine has work: lease requests, weight transfers and puts are futures that are looked at
between two engine steps.
"""

from collections.abc import Callable, Sequence
from concurrent import futures

import structlog

from brokers.channel import Pending, wait
from brokers.client import Leased, Result, SampleClient
from brokers.weight_client import Follower
from common.errors import Reject, WireError
from common.group import PolicyVersion
from common.settings import Config
from common.tensor import NamedTensor
from workers.rollout.engine import Completion, Engine, Request
from workers.rollout.requests import request_of, result_of

STEP_SECONDS = 0.05
"""how long an engine behind HTTP may keep the loop waiting, unless a reply interrupts it"""
IDLE_SECONDS = 0.2
"""how long an idle loop waits for a lease or for weights before it looks at its stop flag"""
LEASE_SECONDS = 1.0


class Rollout:
    """One engine at work. `decode`: token ids to text without special tokens."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        client: SampleClient,
        follower: Follower,
        decode: Callable[[Sequence[int]], str],
        stop_ids: tuple[int, ...],
        forbidden_ids: tuple[int, ...],
    ) -> None:
        self._config, self._engine, self._client, self._follower = config, engine, client, follower
        self._decode, self._stop_ids, self._forbidden_ids = decode, stop_ids, forbidden_ids
        self._at_work: dict[str, tuple[Leased, Request]] = {}
        self._puts: list[tuple[Pending, list[Result]]] = []
        self._leases: dict[Pending, PolicyVersion] = {}  # lease requests under way, with the version that asked
        self._arrived: tuple[PolicyVersion, list[NamedTensor]] | None = None  # verified, not yet loaded
        self._fence = 0
        self._patience = 0.0 if config.mode == "sync" else LEASE_SECONDS
        self._log = structlog.get_logger(part="rollout")

    def run(self, over: Callable[[], bool]) -> None:
        """Work until `over()`; then give back what is unfinished. In sync mode the device is not ours at first."""
        if self._config.mode == "sync":
            self._engine.sleep()
        while not over():
            self.follow_weights()
            if self._config.mode == "sync" and not self._has_turn():
                continue
            self.lease()
            if self._engine.running():
                self.push(self._engine.step(STEP_SECONDS))
                self._tell()
            else:
                self._idle()
            self._confirm(block=False)
        self.drain()

    def follow_weights(self) -> None:
        """Switch to a newer version if one is here, verified, and the in-flight policy allows it now."""
        self._arrived = self._follower.poll() or self._arrived
        if self._arrived is None or (self._config.weights.in_flight == "finish" and self._engine.running()):
            return
        (version, tensors), self._arrived = self._arrived, None
        try:
            self._engine.load(version, tensors)
        except WireError as error:
            self._log.error("weights refused", version=version, error=str(error), serving=self._engine.version)
        self._client.channel.pulse.report(policy_version=self._engine.version)

    def lease(self) -> None:
        """Ask for as many groups as the engine has room for, and again when its version has changed."""
        newer = self._arrived is not None or self._follower.staged
        if self._config.weights.in_flight == "finish" and newer and self._engine.running():
            return  # the running groups end under the old version; new ones, leased or not, wait for the new one
        for pending in [pending for pending in self._leases if pending.done()]:
            self._submit(pending, self._leases.pop(pending))
        if self._config.mode == "sync" and not self._fence:
            return  # the turn was passed on: what is leased now would wait for the next one
        room, version = self._engine.room(), self._engine.version
        if room > 0 and version not in self._leases.values():
            asked = self._client.request_lease("rollout", room, self._patience, version)
            asked.add_done_callback(lambda _: self._engine.interrupt())
            self._leases[asked] = version

    def push(self, completions: Sequence[Completion]) -> None:
        """Put what finished and acknowledge it, without waiting for the answer."""
        results: list[Result] = []
        for completion in completions:
            leased, request = self._at_work.pop(completion.group)
            results.append(result_of(leased, request, completion, self._decode))
        if results:
            self._puts.append((self._client.put(results), results))

    def drain(self) -> None:
        """Push what is done, give back what is not: it is no fault of the groups."""
        self._confirm(block=True)
        self._client.lease("rollout", 0, 0.0)  # withdraws open requests: they would be given what is given back
        self._engine.abort(list(self._engine.running()))
        held = [leased for leased, _ in self._at_work.values()]
        for pending in self._leases:
            if pending.done() and pending.exception() is None:
                held += self._client.take(pending.result()).leases
        if held:
            self._client.nack(held, "rollout worker stops", fault=False)
        self._at_work.clear()

    def _tell(self) -> None:
        """Report how far generation is: of a long response, too, before it is finished."""
        self._client.channel.pulse.report(tokens=self._engine.generated, running=len(self._at_work))

    def _submit(self, pending: Pending, version: PolicyVersion) -> None:
        """Hand what was leased to the engine. Nothing for the `version` that asked says nothing of a newer one."""
        batch = self._client.take(wait(pending))
        for leased in batch.leases:
            try:
                request = request_of(leased, self._config, self._stop_ids, self._forbidden_ids)
                if self._at_work.pop(request.group, None):  # its lease ran out: it begins anew, as at any other worker
                    self._engine.abort([request.group])
                self._engine.submit(request)
            except Reject as error:
                self._client.nack([leased], error.reason)
            else:
                self._at_work[request.group] = (leased, request)
        if self._config.mode == "sync":
            self._patience = LEASE_SECONDS if batch.starved == "waiting for prompts" else 0.0
        if self._fence and not batch.leases and batch.starved and version == self._engine.version:
            self._pass_turn(batch.starved)

    def _idle(self) -> None:
        waiting = [*self._leases, *self._follower.pending(), *(pending for pending, _ in self._puts)]
        futures.wait(waiting, IDLE_SECONDS, futures.FIRST_COMPLETED)

    def _confirm(self, *, block: bool) -> None:
        done = [(pending, results) for pending, results in self._puts if block or pending.done()]
        self._puts = [entry for entry in self._puts if entry not in done]
        for pending, results in done:
            self._client.confirm(pending, results)

    def _has_turn(self) -> bool:
        if not self._fence:
            self._fence = self._client.take_turn("rollout", IDLE_SECONDS)
            if self._fence:
                self._engine.wake()
        return self._fence > 0

    def _pass_turn(self, starved: str) -> None:
        """Free the device for the trainer once nothing more can be generated with the newest weights."""
        busy = self._engine.running() or self._leases or self._engine.version < self._client.version
        if busy or starved == "waiting for prompts":
            return
        self._confirm(block=True)
        self._engine.sleep()
        self._client.give_turn("rollout", self._fence)
        self._fence = 0
