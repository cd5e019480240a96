"""A journal that keeps everything: the whole run can be read afterwards, and recovery reads only what it needs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import structlog

from brokers.channel import MemoryBroker
from brokers.durable import DurableService
from brokers.journal import Journal, number_of, segments
from brokers.record import Limits
from common.clock import ManualClock
from common.section import Section, SectionInfo, decode
from contract import STAGES, Worker, answer
from test_recovery import FACTS, portrait

pytestmark = pytest.mark.unit


def opened(folder: Path) -> DurableService:
    journal = Journal(folder, 2_000, fsync=False)
    return DurableService(FACTS, STAGES, Limits(2, 1), journal, 0.0, keep=True)


def run(service: DurableService, steps: range) -> None:
    """Two groups a step, each of them trained and committed."""
    worker = Worker(MemoryBroker(service, ManualClock()).connect("w", "1"), "w")
    worker.hello("rollout", "h", 1)
    for version in steps:
        worker.offer(2 * version, 2 * version + 1)
        leases = worker.get("rollout", 2, version)
        results = [replace(answer("rollout", each), version_min=version, version_max=version) for each in leases]
        worker.confirm(worker.put(results), results)
        worker.finish("reward", worker.get("reward", 2))
        worker.ack(worker.get("trainer", 2, version), version)
        worker.advance(version + 1)
        worker.commit(version + 1)


def test_every_event_of_a_run_is_found_by_a_plain_arrow_reader(tmp_path: Path) -> None:
    run(opened(tmp_path), range(10))
    rows: list[dict[str, object]] = []
    for segment in segments(tmp_path):
        with pa.memory_map(str(segment)) as mapped, pa.ipc.open_stream(mapped) as reader:
            rows += reader.read_all().to_pylist()
    assert [number_of(segment) for segment in segments(tmp_path)] == list(range(1, len(segments(tmp_path)) + 1))
    # 20 groups: each is added with 2 sections, leased by 3 stages, put with 1 section by 2, acknowledged by 3;
    # 20 x 2 + 40 x 1 sections
    counted = Counter(row["event"] for row in rows)
    assert {kind: counted[kind] for kind in ("add", "lease", "put", "ack", "section", "advance", "commit")} == {
        "add": 20, "lease": 60, "put": 40, "ack": 60, "section": 80, "advance": 10, "commit": 10,
    }  # fmt: skip
    assert counted["state"] == len(segments(tmp_path)) > 5
    response = next(row for row in rows if row["section"] == "response")
    info = SectionInfo("response", response["rows"], len(response["data"]), response["checksum"])  # type: ignore[arg-type]
    assert decode(Section(info, response["data"])).column("text").to_pylist() == [response["group"]]  # type: ignore[arg-type]


def test_a_broker_that_comes_back_reads_only_the_segments_that_it_needs(tmp_path: Path) -> None:
    service = opened(tmp_path)
    run(service, range(20))
    before, written = portrait(service), len(segments(tmp_path))
    with structlog.testing.capture_logs() as logged:
        service = opened(tmp_path)
    assert portrait(service) == before
    assert len(segments(tmp_path)) == written + 1
    (told,) = [each for each in logged if each["event"] == "recovered"]
    assert told["events"] < 40  # of some 15 a step
    run(service, range(20, 22))
    assert opened(tmp_path).ledger.counts.trained == 44


def test_a_newest_segment_that_cannot_be_read_leaves_the_one_before_in_charge(tmp_path: Path) -> None:
    service = opened(tmp_path)
    run(service, range(5))
    newest = segments(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    trained = opened(tmp_path).ledger.counts.trained
    assert 0 < trained <= 10
    assert not newest.exists() or newest.stat().st_size != 1000
