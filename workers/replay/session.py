"""A worker's session without a run: the brokers are in this process, and recorded groups are all there is.

The worker's own code does not know: it joins, leases, puts, acknowledges and leaves as ever.
"""

import argparse
import os
import socket
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from brokers.channel import MemoryBroker
from brokers.client import SampleClient
from brokers.recording import new_folder
from brokers.weight_client import WeightClient
from brokers.weights import WeightService
from common.clock import SystemClock
from common.errors import WorkerError
from common.process import Stop
from workers.replay.material import Material, prepare
from workers.replay.outcome import Account
from workers.replay.service import ReplayService
from workers.session import Session

TICK_SECONDS = 0.05
"""how often time passes for the brokers, so that who waits is told in time"""


@dataclass(slots=True)
class ReplaySession(Session):
    """A session whose weight broker is in this process; what it serves begins with the model's folder, version 0."""

    weight_broker: MemoryBroker | None = field(default=None, kw_only=True)

    def weights(self, role: str) -> WeightClient:
        """Connect to the weight broker."""
        assert self.weight_broker is not None, "made with it"
        channel = self.weight_broker.connect(self.name, self.incarnation)
        self._weights = WeightClient(channel, self.name, self.client.run)
        self._weights.hello(role, socket.gethostname(), os.getpid())
        return self._weights


@contextmanager
def replayed(role: str, args: argparse.Namespace) -> Generator[Session]:
    """Let a worker work on the groups of `args.replay`; print what became of each, also if it fails on the way.

    Raises `WorkerError` at the end if a group died.
    """
    material = prepare(role, args)
    with ExitStack() as stack:
        if args.out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        else:
            folder = new_folder(Path(args.out)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
        print(_beginning(material), flush=True)
        clock = SystemClock()
        service = ReplayService(material, str(folder), clock)
        samples = MemoryBroker(service, clock)
        weights = MemoryBroker(WeightService(service.run, material.config.weights.keep_versions), clock)
        client = SampleClient(samples.connect(args.name, "replay"), args.name, args.run)
        welcome = client.hello(role, socket.gethostname(), os.getpid())
        session = ReplaySession(client, welcome, Stop(), args.name, "replay", weight_broker=weights)
        with _time_passing([samples, weights]):
            try:
                yield session
            finally:
                session.close()
                account = Account(material, service.outcomes)
                print(account.text(folder), flush=True)
                if args.out is not None:
                    print(f"{account.write(folder)} bytes in {args.out}, to be replayed in turn", flush=True)
    if account.ends["dead"]:
        raise WorkerError(f"{account.ends['dead']} of {len(service.outcomes)} groups died, see 'given back' above")


@contextmanager
def _time_passing(brokers: Sequence[MemoryBroker]) -> Generator[None]:
    """Let brokers in memory notice the time."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TICK_SECONDS):
            for broker in brokers:
                broker.tick()

    thread = threading.Thread(target=run, name="time")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beginning(material: Material) -> str:
    recording, lines = material.recording, list[str]()
    if recording.torn:
        lines.append(f"torn: {recording.torn}; what is before it is used")
    lines += [f"skipped {count} groups: {reason}" for reason, count in material.skipped.items()]
    what = f"{len(material.groups)} groups of run {material.facts.run} from {recording.folder}"
    return "\n".join([*lines, f"replaying {what} into {material.role}"])
