"""How long a sample broker takes to be back after kill -9, by what its journal holds.

    python tests/bench/recovery.py [--gigabytes 1] [--events 1000000] [--folder DIR] [--json FILE]

Two journals are written by a broker in another process, which is then killed: one of groups with a section of 200 kB,
all of them alive at the end, and one of small events, of groups that go all the way and are trained and committed.
Another process then opens the journal. Its seconds are those from the journal to a broker that can serve, the start of
Python aside; bytes are those of the files. Files are in the page cache if the machine has room for them.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script finds only its own folder

import xxhash  # noqa: E402

from brokers.conduct import Facts  # noqa: E402
from brokers.durable import DurableService  # noqa: E402
from brokers.journal import Journal, segments  # noqa: E402
from brokers.record import Limits, StageSpec  # noqa: E402
from brokers.service import Message  # noqa: E402
from common import logs  # noqa: E402
from common.header import Header, Item  # noqa: E402
from common.section import Section, SectionInfo  # noqa: E402
from tests.bench import table  # noqa: E402

SECTION_BYTES = 200_000
TOGETHER = 64
"""messages a commit, as in a busy broker"""
ROLLOUT = {"name": "rollout", "requires": ["prompt"], "adds": ["response"], "purposes": ["train"]}
TRAINER = {"name": "trainer", "requires": ["response"], "adds": [], "purposes": ["train"]}
STAGES = [StageSpec.from_wire(spec) for spec in (ROLLOUT, TRAINER)]


def opened(folder: Path) -> DurableService:
    limits = Limits(TOGETHER, max_queue_groups=1 << 40, max_queue_bytes=1 << 60, lease_seconds=1e9)
    journal = Journal(folder, 256 << 20, fsync=False)
    return DurableService(Facts("bench", "{}", "/nowhere"), STAGES, limits, journal, 0.0)


def say(service: DurableService, verb: str, items: Sequence[Item], *sections: Section, **body: Any) -> tuple[Item, ...]:
    """Let a worker say something and return what it is handed; what was said is durable after the next `release`."""
    header = Header(verb, worker="w", stage=str(body.pop("stage", "")), items=tuple(items), body=body)
    service.take(Message("w#1", header, [section.data for section in sections], 0.0))
    return service.flush()[-1].header.items


def section(name: str, length: int) -> Section:
    return Section(SectionInfo(name, 1, length, xxhash.xxh3_64_intdigest(bytes(length))), bytes(length))


def train(service: DurableService, version: int, first: int) -> int:
    """Let `TOGETHER` groups go through the whole pipeline in one update; return the number of events."""
    prompt, response = section("prompt", 1), section("response", 1)
    for seq in range(first, first + TOGETHER):
        say(service, "add", [Item(f"g{seq}", seq, sections=(prompt.info,))], prompt)
    service.release(0.0)
    for item in say(service, "lease", (), stage="rollout", want=TOGETHER, version=version):
        done = replace(item, sections=(response.info,), version_min=version, version_max=version, facts={})
        say(service, "put", [done], response, ack=True)
    service.release(0.0)
    for item in say(service, "lease", (), stage="trainer", want=TOGETHER, version=version):
        say(service, "ack", [replace(item, sections=(), facts={})], step=version)
    for verb in ("advance", "commit"):
        say(service, verb, (), version=version + 1)
    service.release(0.0)
    return 6 * TOGETHER + 2  # add, lease, put, ack, lease, ack


def write(folder: Path, num_bytes: int, num_events: int) -> None:
    """Journal groups of `SECTION_BYTES` up to `num_bytes` and small events up to `num_events`; wait to be killed."""
    service = opened(folder)
    say(service, "hello", ())
    large, began, seq, events, version = section("prompt", SECTION_BYTES), time.perf_counter(), 0, 0, 0
    while seq * SECTION_BYTES < num_bytes:
        say(service, "add", [Item(f"g{seq}", seq, sections=(large.info,))], large)
        seq += 1
        if seq % TOGETHER == 0 or not service.holding:
            service.release(0.0)
    service.release(0.0)
    while events < num_events:
        events += train(service, version, seq)
        seq, version = seq + TOGETHER, version + 1
    print(json.dumps({"seconds": time.perf_counter() - began, "events": events}), flush=True)
    sys.stdin.read()


def read(folder: Path) -> None:
    began = time.perf_counter()
    groups = opened(folder).ledger.books.records
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time()
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "groups": len(groups)}), flush=True)


def told(folder: Path, *words: str) -> dict[str, Any]:
    """Let this script work on `folder` in a process of its own; kill it when it has told what it measured."""
    command = [sys.executable, __file__, "--folder", str(folder), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        child.kill()
    return json.loads(line)


def measure(num_bytes: int, num_events: int, parent: Path | None) -> list[table.Row]:
    """Write a journal, kill its broker, let another come back, and return the figures; the files are deleted."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        written = told(folder, "--write", f"{num_bytes} {num_events}")
        size = sum(segment.stat().st_size for segment in segments(folder)) / 1e9
        back = told(folder, "--read")
    what = f"journal of {num_bytes / 1e9:g} GB" if num_bytes else f"journal of {num_events:,} events"
    amount, unit = (size, "GB/s") if num_bytes else (written["events"], "events/s")
    return [
        table.Row(f"{what}: writing", amount / written["seconds"], unit, f"{size:.2f} GB of files"),
        table.Row(f"{what}: back after kill -9", back["seconds"], "s", f"{back['groups']:,} groups alive"),
        table.Row(f"{what}: CPU of that, with Python's start", back["cpu_seconds"], "s"),
        table.Row(f"{what}: back after kill -9", amount / back["seconds"], unit),
    ]


def recovery(gigabytes: float, events: int, parent: Path | None = None) -> list[table.Row]:
    """Return the figures of both journals, which are written below `parent`."""
    return measure(int(gigabytes * 1e9), 0, parent) + measure(0, events, parent)


def main() -> None:
    """Parse the command line, measure and print."""
    parser = table.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="journaled as sections of 200 kB")
    parser.add_argument("--events", type=int, default=1_000_000, help="journaled as small events")
    parser.add_argument("--folder", type=Path, help="where to write; by default that for temporary files")
    parser.add_argument("--write", help="'BYTES EVENTS': be the broker that is killed")
    parser.add_argument("--read", action="store_true", help="be the broker that comes back")
    args = parser.parse_args()
    logs.configure("bench")
    if args.write:
        write(args.folder, *map(int, args.write.split()))
    elif args.read:
        read(args.folder)
    else:
        table.report(recovery(args.gigabytes, args.events, args.folder), args.json)


if __name__ == "__main__":
    main()
