"""How often the bytes of an image travel: once per group to a stage that requires them, never to one that does not.

Every worker reaches the broker through a relay of its own that counts what passes, in both directions: payload,
headers, heartbeats, handshakes, all of it as the kernel hands it over. Groups carry one image of 1 MB each. Media come
with the prompt; rollout and reference require them, reward does not.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from brokers.channel import wait
from brokers.client import Leased, Result, SampleClient
from brokers.dealer import DealerChannel
from brokers.record import StageSpec
from common.group import GroupKey
from common.section import Section, encode
from tests.bench.driver import BrokerProcess
from tests.bench.sections import BOTH, columns, empty_prompt, encoded
from tests.bench.table import Row, at_most
from tests.bench.workloads import GROUPS, SAMPLES, images

WAIT_SECONDS = 30.0
OVERHEAD, NOTHING = 1.05, 0.01
"""bytes moved over unique bytes: the most for a stage that requires media, and what counts as none"""


class CountingRelay:
    """Passes one connection on to a broker, byte by byte, and counts."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the worker has hung up."""
        self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        with self._listener:
            worker, _ = self._listener.accept()
        with worker, socket.create_connection(self._upstream) as broker, selectors.DefaultSelector() as selector:
            selector.register(worker, selectors.EVENT_READ, broker)
            selector.register(broker, selectors.EVENT_READ, worker)
            buffer = bytearray(1 << 18)
            while True:
                for key, _ in selector.select():
                    source: Any = key.fileobj
                    length = source.recv_into(buffer)
                    if not length:
                        return
                    self.count += length
                    key.data.sendall(memoryview(buffer)[:length])


class Consumer:
    """A worker behind a relay."""

    def __init__(self, broker: BrokerProcess, name: str) -> None:
        self.relay = CountingRelay(broker.address)
        self._channel = DealerChannel(self.relay.address, name, "0")
        self.client = SampleClient(self._channel, name)
        self.client.hello(name, socket.gethostname(), os.getpid())

    def lease(self, stage: str) -> list[Leased]:
        """Return all groups of a stage."""
        found: list[Leased] = []
        while len(found) < GROUPS:
            batch = self.client.lease(stage, GROUPS - len(found), WAIT_SECONDS, 0 if stage == "rollout" else None)
            assert batch.leases, f"{stage}: {batch.starved}"
            found += batch.leases
        return found

    def close(self) -> None:
        """Hang up."""
        self._channel.close(0.0)
        self.relay.close()


def rows(folder: Path, settings: Mapping[str, Any]) -> list[Row]:
    """Return bytes moved per group over its unique bytes, for each stage."""
    prompt = frozenset({"prompt", "media"})
    answer = frozenset({"tokens", "response"})
    stages = [
        StageSpec("rollout", prompt, answer, BOTH),
        StageSpec("reference", frozenset({"media", "tokens"}), frozenset({"reference"}), BOTH),
        StageSpec("reward", frozenset({"prompt", "response"}), frozenset({"reward"}), BOTH),
        StageSpec("trainer", frozenset({"reference", "reward", "advantage"}), frozenset(), BOTH),
    ]
    groups = [{section.name: section for section in sections} for sections in encoded(columns(images()))]
    unique = sum(section.info.length for sections in groups for section in (*sections.values(), _response()))
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(contextlib.closing(BrokerProcess(folder, stages, settings)))

        def join(name: str) -> Consumer:
            return stack.enter_context(contextlib.closing(Consumer(broker, name)))

        prompts, rollout, reference, reward = (join(name) for name in ("prompts", "rollout", "reference", "reward"))
        keys = [GroupKey(f"g{seq}", seq) for seq in range(GROUPS)]
        added = [(key, (empty_prompt(), sections["media"])) for key, sections in zip(keys, groups, strict=True)]
        wait(prompts.client.add(added, WAIT_SECONDS))
        leases = rollout.lease("rollout")
        results = [
            Result(lease, (sections["tokens"], _response()), 0, 0)
            for lease, sections in zip(leases, groups, strict=True)
        ]
        assert not rollout.client.confirm(rollout.client.put(results), results)
        assert all(lease.group.value("media_data") for lease in reference.lease("reference"))
        assert all("media" not in lease.group.sections for lease in reward.lease("reward"))
        counts = {worker.client.worker: worker.relay.count for worker in (prompts, rollout, reference, reward)}
    share = {name: count / unique for name, count in counts.items()}
    about = "unique bytes of a group"
    return [
        at_most("media: bytes moved by prompts", share["prompts"], "times", about, OVERHEAD),
        at_most("media: bytes moved by rollout, which requires media", share["rollout"], "times", about, OVERHEAD),
        at_most("media: bytes moved by reference, which requires media", share["reference"], "times", about, OVERHEAD),
        at_most("media: bytes moved by reward, which does not", share["reward"], "times", about, NOTHING),
    ]


def _response() -> Section:
    """Short texts: what a reward reads."""
    short = {"text": ["7"] * SAMPLES, "finish_reason": ["stop"] * SAMPLES, "num_tokens": [256] * SAMPLES}
    return encode("response", short)
