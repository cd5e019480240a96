"""One node's part of a run on several: the first one is the head, the others keep their rollout workers alive.

Nobody commands the nodes: all lay out the same plan, meet at the sample broker that the head announces in the run's
folder, and leave when that broker says the run is over.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

import structlog

from brokers.client import SampleClient
from common.errors import BrokerError, WorkerError
from common.process import Stop
from launch.plan import Plan
from launch.run import WORKERS, Head, announced, environment
from launch.supervisor import NodeSupervisor

LOOK_SECONDS = 0.5


def run(plan: Plan, node: int, stop: Stop) -> int:
    """Do the part of node `node` until the run ends; return 0 if it finished."""
    return Head(plan, stop).run() if node == 0 else FarNode(plan, node, stop).run()


class FarNode:
    """A node without brokers. It is a member of the run, so that the broker stays until it knows how the run ended."""

    def __init__(self, plan: Plan, node: int, stop: Stop) -> None:
        self._plan, self._node, self._stop = plan, node, stop
        self._name = f"node-{node}"
        self._settings = plan.config.supervisor
        self._folder = Path(plan.folder)
        self._supervisor = NodeSupervisor(self._settings, self._folder, environment(os.environ))
        self._log = structlog.get_logger(part=self._name)

    def run(self) -> int:
        """Keep this node's processes alive until the run ends; return 0 if it finished.

        Raises `Unreachable` when the broker does not announce itself in time, or later falls silent.
        """
        # The head makes the model and then starts the broker; each may take this long.
        seconds = 2 * self._settings.start_seconds
        self._log.info("waits for the sample broker", run=self._plan.run, folder=self._plan.folder, seconds=seconds)
        told = announced(self._folder, self._plan.run, seconds, self._stop)
        channel = told.connect(self._name)
        client = SampleClient(channel, self._name, self._plan.run)
        try:
            client.hello("node", socket.gethostname(), os.getpid(), seconds=self._settings.start_seconds)
            channel.start_heartbeats()
            self._supervisor.start(self._plan.on(self._node), told.address, told.key)
            state, reason = self._watch(client)
        finally:
            self._supervisor.stop()
            with suppress(BrokerError):  # it has gone already
                client.leave(seconds=2.0)
            channel.close(drain_seconds=0.5)
        self._log.info("leaves", run=self._plan.run, state=state, reason=reason)
        return 0 if state == "finished" else WorkerError.exit_code

    def _watch(self, client: SampleClient) -> tuple[str, str]:
        """Keep the processes alive until the run ends; return its state and the reason."""
        while True:
            self._supervisor.look()
            if self._supervisor.failure:
                reason = f"{self._name} on {socket.gethostname()}: {self._supervisor.failure}"
                client.end("failed", reason)
                return "failed", reason
            if self._stop.is_set():
                return "stopped", "asked to stop"
            status = client.status(seconds=self._plan.config.broker.request_seconds)
            if status["state"] != "running":
                self._supervisor.wait_for_exit(WORKERS, self._settings.grace_seconds)
                return status["state"], status["reason"]
            client.channel.pulse.report(**self._supervisor.describe())
            self._stop.wait(LOOK_SECONDS)
