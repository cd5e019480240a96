"""Start a broker: `python -m brokers samples --plan FILE` or `python -m brokers weights --broker ADDRESS`."""

import argparse
import json
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from brokers.client import SampleClient
from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.keys import read_broker_key, read_worker_key
from brokers.record import Limits, StageSpec
from brokers.recovery import clear_other_runs
from brokers.router import Router
from brokers.samples import SampleService
from brokers.spill import SpillStore
from brokers.store import MemoryStore
from brokers.weights import WeightService
from common import logs
from common.clock import SystemClock
from common.config import from_json
from common.errors import ConfigError, Unreachable
from common.process import Stop, run_main, write_atomically
from common.settings import Config

SILENT_BEATS = 3
"""a member that missed so many heartbeats is not waited for"""


def limits_of(config: Config) -> Limits:
    """Return the bounds that a configuration sets for the ledger."""
    broker = config.broker
    window = (config.max_staleness + 1) * config.groups_per_step
    return Limits(
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        total_groups=None if config.steps is None else config.steps * config.groups_per_step,
        lease_seconds=broker.lease_seconds,
        max_attempts=broker.max_attempts,
        max_queue_groups=broker.max_queue_groups or 2 * window,
        max_queue_bytes=broker.max_queue_bytes,
        max_bytes=broker.max_bytes,
        in_order=config.deterministic,
        stragglers=config.staleness.policy,
        straggler_seconds=config.staleness.straggler_seconds,
        late_factor=config.staleness.factor,
        order=broker.order,
        fairness_seconds=broker.fairness_seconds,
        lanes=broker.lanes,
        watchdog_seconds=config.watchdog.seconds,
        watchdog_action=config.watchdog.action,
    )


def serve_samples(args: argparse.Namespace, stop: Stop) -> None:
    """Serve the sample broker of the run that a plan file describes, until told to stop.

    It then still serves its members until they have left: whoever ends a job tells all its processes to stop at once,
    and workers give back what they hold.
    """
    try:
        plan = json.loads(Path(args.plan).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {args.plan}: {error}; `relaxq plan CONFIG --json` prints one") from error
    config = from_json(json.dumps(plan["config"]))
    key = read_broker_key(Path(args.key)) if args.key else None
    facts = Facts(plan["run"], json.dumps(plan["config"]), plan["folder"])
    clock = SystemClock()
    stages = [StageSpec.from_wire(spec) for spec in plan["stages"]]
    port = config.broker.port if args.port is None else args.port
    store = SpillStore(MemoryStore(), Path(facts.folder) / "spill", config.broker.memory_bytes)
    if config.broker.journal:
        folder = Path(facts.folder) / "journal"
        clear_other_runs(folder, facts.run)
        journal = Journal(folder, config.broker.journal_segment_bytes, fsync=config.broker.journal_fsync)
        keep = config.broker.journal_keep
        service = DurableService(facts, stages, limits_of(config), journal, clock.now(), store, keep=keep)
        port = _port_of(args.announce, facts.run) or port
    else:
        service = SampleService(facts, stages, limits_of(config), store)
    endpoint = f"tcp://{args.host or config.broker.host}:{port}"
    router = Router(service, endpoint, clock, config.broker.high_water_mark, key)
    service.log.info("serving", run=facts.run, address=router.address)
    if args.announce:
        announcement = {"address": router.address, "run": facts.run, "pid": os.getpid(), "encrypted": bool(args.key)}
        write_atomically(Path(args.announce), announcement)
    router.run(stop.is_set)
    # Workers have the grace time to leave; only then supervisors say their last word.
    until = clock.now() + 2 * config.supervisor.grace_seconds
    silent = SILENT_BEATS * config.broker.heartbeat_seconds
    router.run(lambda: clock.now() >= until or not service.roster.heard_since(clock.now() - silent))
    router.close()
    service.close()


def _port_of(announcement: str | None, run: str) -> int:
    """Return the port that a broker of this run had before, where its workers look for it; 0 if there was none."""
    try:
        told = json.loads(Path(announcement).read_text(encoding="utf-8")) if announcement else {}
    except (OSError, ValueError):
        return 0
    return int(told["address"].rpartition(":")[2]) if told.get("run") == run else 0


def serve_weights(args: argparse.Namespace, stop: Stop) -> None:
    """Serve the weight broker of the run at a sample broker's address, until the run ends or told to stop."""
    if bool(args.key) != bool(args.worker_key):
        raise ConfigError("--key encrypts this broker and --worker-key its way to the sample broker: give both or none")
    key = read_broker_key(Path(args.key)) if args.key else None
    worker_key = read_worker_key(Path(args.worker_key)) if args.worker_key else None
    channel = DealerChannel(args.broker, args.name, uuid.uuid4().hex[:8], key=worker_key)
    client = SampleClient(channel, args.name, args.run)
    try:
        welcome = client.hello("weights", socket.gethostname(), os.getpid(), seconds=args.deadline)
        config = welcome.config
        service = WeightService(welcome.run, config.weights.keep_versions)
        endpoint = f"tcp://{args.host or config.broker.host}:{args.port or 0}"
        router = Router(service, endpoint, SystemClock(), config.broker.high_water_mark, key)
        client.hello("weights", socket.gethostname(), os.getpid(), endpoint=router.address, seconds=args.deadline)
        channel.start_heartbeats()
        service.log.info("serving", run=welcome.run, address=router.address)
        router.run(lambda: stop.is_set() or client.ended)
        router.close()
        with suppress(Unreachable):  # the sample broker is gone already; there is nobody to say goodbye to
            client.leave(seconds=2.0)
    finally:
        channel.close(drain_seconds=1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m brokers", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    samples = kinds.add_parser("samples", help="the sample broker")
    samples.add_argument("--plan", required=True, metavar="FILE", help="plan.json of the run's folder")
    samples.add_argument("--announce", metavar="FILE", help="where to write the address that was bound")
    weights = kinds.add_parser("weights", help="the weight broker")
    weights.add_argument("--broker", required=True, metavar="ADDRESS", help="address of the sample broker")
    weights.add_argument("--name", default=f"weights-{socket.gethostname()}-{os.getpid()}")
    weights.add_argument("--run", default="", help="refuse any other run")
    weights.add_argument("--deadline", type=float, default=30.0, metavar="SECONDS", help="for the first answer")
    weights.add_argument("--worker-key", metavar="FILE", help="worker.key of an encrypted run, to reach its samples")
    for kind in (samples, weights):
        kind.add_argument("--key", metavar="FILE", help="broker.key of a run; without it nothing is encrypted")
        kind.add_argument("--host", help="host to bind; default: broker.host")
        kind.add_argument("--port", type=int, help="port to bind; default: any free one, or broker.port")
        kind.add_argument("--log-json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    logs.configure(args.kind, json_lines=args.log_json)
    stop = Stop().install()
    {"samples": serve_samples, "weights": serve_weights}[args.kind](args, stop)
    return 0


if __name__ == "__main__":
    run_main(main)
