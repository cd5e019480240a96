"""How a worker enters a run: parse, connect, say hello, learn everything else from the answer.

Until its work begins it holds nothing, so a signal ends it at once, even in the middle of an import; from then on a
signal only asks the loop to come to an end.
"""

import argparse
import os
import signal
import socket
import sys
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from brokers.client import SampleClient, Welcome
from brokers.dealer import DealerChannel
from brokers.keys import WorkerKey, read_worker_key
from brokers.weight_client import WeightClient
from common import logs
from common.errors import BrokerError, Unreachable, WireError
from common.process import Stop
from common.settings import Config


@dataclass(slots=True)
class Session:
    """One worker's place in a run. `folder`: the run's folder, an absolute path. `key`: of an encrypted run."""

    client: SampleClient
    welcome: Welcome
    stop: Stop
    name: str
    incarnation: str
    key: WorkerKey | None = None
    _weights: WeightClient | None = field(default=None)

    @property
    def config(self) -> Config:
        """The run's resolved configuration."""
        return self.welcome.config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.welcome.folder)

    @property
    def model_folder(self) -> Path:
        """Folder of the initial model: the one configured, or the one that the recipe made."""
        path = self.config.model.path
        return Path(path) if path is not None else self.folder / "model"

    @property
    def over(self) -> bool:
        """Whether to leave: told to stop, or the run has ended."""
        return self.stop.is_set() or self.client.ended

    def begin(self) -> None:
        """The work begins: from now on SIGTERM and SIGINT set the stop flag."""
        self.stop.install()

    def weights(self, role: str) -> WeightClient:
        """Connect to the weight broker; raises `Unreachable` when it has not joined within the request deadline.

        Ends the process, in order, when the run ends meanwhile.
        """
        seconds = self.config.broker.request_seconds
        endpoints: dict[str, str] = self.client.channel.pulse.state.get("endpoints", {})
        waited = 0.0
        while "weights" not in endpoints:
            if self.over:
                sys.exit(0)
            if waited >= seconds:
                raise Unreachable(f"no weight broker joined run {self.client.run} within {seconds:g} s")
            self.stop.wait(0.1)
            waited += 0.1
            self.client.status()
            endpoints = self.client.channel.pulse.state.get("endpoints", {})
        channel = DealerChannel(endpoints["weights"], self.name, self.incarnation, key=self.key)
        self._weights = WeightClient(channel, self.name, self.client.run)
        self._weights.hello(role, socket.gethostname(), os.getpid(), seconds=seconds)
        channel.start_heartbeats()
        return self._weights

    def close(self) -> None:
        """Say goodbye and close the channels."""
        if self._weights is not None:
            with suppress(BrokerError, WireError):  # it has left with the run, or this worker never became a member
                self._weights.leave(seconds=0.5)
            self._weights.channel.close(drain_seconds=1.0)
        with suppress(Unreachable):  # the broker is gone already; there is nobody to say goodbye to
            self.client.leave(seconds=2.0)
        self.client.channel.close(drain_seconds=2.0)


def parse(role: str, argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Parse what all workers have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m workers.{role}", description=description)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--broker", metavar="ADDRESS", help="the sample broker, tcp://HOST:PORT")
    where.add_argument("--replay", metavar="DIR", help="no run: a tap's folder, or the journal of a run")
    parser.add_argument(
        "--name", default=f"{role}-{socket.gethostname()}-{os.getpid()}", help="name in the run; one worker each"
    )
    parser.add_argument("--run", default="", help="refuse any other run")
    parser.add_argument("--key", metavar="FILE", help="keys/worker.key in the folder of an encrypted run")
    parser.add_argument("--deadline", type=float, default=30.0, metavar="SECONDS", help="for the first answer")
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
    alone = parser.add_argument_group("with --replay")
    alone.add_argument("--limit", type=_count, metavar="N", help="only the first N groups")
    alone.add_argument("--out", metavar="DIR", help="new folder for the results")
    alone.add_argument("--config", metavar="FILE", help="instead of the recorded configuration")
    alone.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated")
    args = parser.parse_args(argv)
    given = [name for name in ("limit", "out", "config", "set") if getattr(args, name)]
    if given and args.replay is None:
        parser.error(f"--{given[0]} goes with --replay; a worker of a run has its settings from the broker")
    return args


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of groups")
    return number


@contextmanager
def joined(role: str, args: argparse.Namespace) -> Generator[Session]:
    """Join the run at `args.broker`, or a replay of `args.replay`, and leave it at the end of the block."""
    logs.configure(role, json_lines=args.log_json)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if args.replay is not None:
        from workers.replay.session import replayed  # noqa: PLC0415 - only who replays needs it

        with replayed(role, args) as session:
            yield session
        return
    incarnation = uuid.uuid4().hex[:8]
    key = read_worker_key(Path(args.key)) if args.key else None
    channel = DealerChannel(args.broker, args.name, incarnation, key=key)
    client = SampleClient(channel, args.name, args.run)
    try:
        welcome = client.hello(role, socket.gethostname(), os.getpid(), seconds=args.deadline)
    except BaseException:
        channel.close(drain_seconds=0.0)
        raise
    channel.start_heartbeats()
    session = Session(client, welcome, Stop(), args.name, incarnation, key)
    try:
        yield session
    finally:
        session.close()


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
