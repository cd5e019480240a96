"""A sample broker as a process of its own: what it takes of the machine."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from brokers.channel import wait
from brokers.dealer import DealerChannel
from common.config import to_json
from contract import CONFIG, SECONDS, STAGES, Worker

pytestmark = pytest.mark.contract
MIB = 1 << 20


@dataclass
class Broker:
    """A broker process and a worker that has joined it."""

    process: subprocess.Popen[bytes]
    worker: Worker

    def resident(self) -> int:
        """Bytes of memory that the broker has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * resource.getpagesize()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    bounded = CONFIG.broker.model_copy(update={"max_queue_bytes": 64 * MIB + 65536})
    config = json.loads(to_json(CONFIG.model_copy(update={"broker": bounded})))
    plan = {"run": "run-a", "folder": str(tmp_path), "config": config, "stages": [s.to_wire() for s in STAGES]}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    announced = tmp_path / "broker.json"
    command = [sys.executable, "-m", "brokers", "samples", "--plan", str(tmp_path / "plan.json")]
    with subprocess.Popen([*command, "--announce", str(announced)], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        ready = threading.Event()

        def read() -> None:
            for line in process.stderr or ():
                if b"serving" in line:
                    ready.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert ready.wait(SECONDS), "the broker did not say that it serves"
        while not announced.exists():
            assert process.poll() is None
        address = json.loads(announced.read_text(encoding="utf-8"))["address"]
        worker = Worker(DealerChannel(address, "prompt-0", "1"), "prompt-0")
        worker.hello("prompt", "host-a", os.getpid(), seconds=SECONDS)
        yield Broker(process, worker)
        worker.leave(SECONDS)
        worker.channel.close(0.0)
        process.kill()
        reader.join(SECONDS)


def test_a_broker_that_holds_64_mib_grows_by_less_than_128(broker: Broker) -> None:
    before = broker.resident()
    for seq in range(8):
        wait(broker.worker.offer(seq, media=bytes(8 * MIB)), SECONDS)
    ninth = broker.worker.offer(8, media=bytes(8 * MIB), seconds=SECONDS)
    assert broker.worker.status(SECONDS)["queues"]["rollout"]["groups"] == 8
    assert not ninth.done()
    assert 64 * MIB < broker.resident() - before < 128 * MIB
