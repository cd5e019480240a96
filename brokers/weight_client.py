"""The verbs of the weight broker, typed, over any channel."""

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass

import structlog

from brokers.channel import Channel, Pending, wait
from brokers.manifest import Manifest, cut, join
from common.errors import Damaged, WireError
from common.group import PolicyVersion
from common.header import Header
from common.section import Buffer
from common.tensor import NamedTensor

TRIES = 3
"""how often a chunk that arrived damaged is pulled or sent again"""

_log = structlog.get_logger(part="weights")


@dataclass(slots=True)
class WeightClient:
    """A publisher's or a receiver's view of the weight broker of `run`."""

    channel: Channel
    worker: str
    run: str

    def hello(self, role: str, host: str, pid: int, *, seconds: float = 30.0) -> None:
        """Join; raises `Unreachable` after `seconds`, `WireError` when the broker belongs to another run."""
        body = {"role": role, "host": host, "pid": pid}
        wait(self.channel.request(Header("hello", run=self.run, worker=self.worker, body=body), seconds=seconds))

    def leave(self, seconds: float) -> None:
        """Say goodbye. Raises `Unreachable` after `seconds`."""
        wait(self.channel.request(Header("bye", run=self.run), seconds=seconds))

    def publish(self, version: PolicyVersion, tensors: Sequence[NamedTensor], chunk_bytes: int) -> int:
        """Publish a version as a whole and return its bytes; publishing the same again changes nothing."""
        manifest, chunks = cut(tensors, version, chunk_bytes)
        header = Header("publish", run=self.run, body={"manifest": manifest.to_wire()})
        if not wait(self.channel.request(header)).header.body["known"]:
            sent = [self._send(manifest, chunks, index) for index in range(len(chunks))]
            for index, pending in enumerate(sent):
                self._sent(manifest, chunks, index, pending)
        return sum(length for length, _ in manifest.chunks)

    def ask(self, newer_than: PolicyVersion, wait_seconds: float) -> Pending:
        """Ask for the manifest of a version newer than `newer_than`; the reply may hold none."""
        body = {"newer_than": newer_than}
        return self.channel.request(Header("manifest", run=self.run, deadline_s=wait_seconds, body=body))

    def pull(self, manifest: Manifest, index: int) -> Pending:
        """Ask for one chunk."""
        body = {"version": manifest.version, "index": index}
        return self.channel.request(Header("pull", run=self.run, body=body))

    def _send(self, manifest: Manifest, chunks: Sequence[Buffer], index: int) -> Pending:
        body = {"version": manifest.version, "index": index}
        return self.channel.request(Header("chunk", run=self.run, body=body), [chunks[index]])

    def _sent(self, manifest: Manifest, chunks: Sequence[Buffer], index: int, pending: Pending) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                wait(pending)
            except Damaged as error:
                if attempt == TRIES:
                    raise
                _log.warning("chunk damaged, sending again", error=str(error))
                pending = self._send(manifest, chunks, index)
            else:
                return


class Follower:
    """Pulls each newer version: ask, stage its chunks, verify them, hand them over. Never blocks.

    A version that cannot be verified is given up with a log line; what was handed over before stays valid. `on_reply`
    is called, from another thread, when `poll` may have something to do.
    """

    def __init__(
        self,
        client: WeightClient,
        version: PolicyVersion,
        wait_seconds: float = 1.0,
        on_reply: Callable[[], object] = lambda: None,
    ) -> None:
        self._client = client
        self._on_reply = on_reply
        self._version = version
        self._wait_seconds = wait_seconds
        self._asked: Pending = self._watched(client.ask(version, wait_seconds))
        self._manifest: Manifest | None = None
        self._pulls: dict[int, Pending] = {}
        self._chunks: dict[int, Buffer] = {}
        self._tries = 0

    @property
    def staged(self) -> bool:
        """Whether a newer version is on its way."""
        return self._manifest is not None

    def pending(self) -> list[Pending]:
        """Return the requests that are under way: wait for one of them before the next `poll`."""
        return list(self._pulls.values()) if self._manifest is not None else [self._asked]

    def poll(self) -> tuple[PolicyVersion, list[NamedTensor]] | None:
        """Return a newer version, verified, or None as long as there is none."""
        if self._manifest is None and self._asked.done():
            told = wait(self._asked).header.body.get("manifest")
            if told is None:
                self._ask()
                return None
            self._manifest = Manifest.from_wire(told)
            self._pulls = {
                index: self._watched(self._client.pull(self._manifest, index))
                for index in range(len(self._manifest.chunks))
            }
        if self._manifest is None:
            return None
        for index in [index for index, pending in self._pulls.items() if pending.done()]:
            if not self._received(self._manifest, index):
                return None
        if self._pulls:
            return None
        manifest = self._manifest
        chunks = [self._chunks[index] for index in range(len(manifest.chunks))]
        self._version = manifest.version
        self._ask()
        return manifest.version, list(join(manifest, chunks))

    def fetch(self, seconds: float) -> tuple[PolicyVersion, list[NamedTensor]] | None:
        """Poll until a newer version is here, at most `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            futures.wait(self.pending(), left, futures.FIRST_COMPLETED)
            while any(pending.done() for pending in self.pending()):
                found = self.poll()
                if found is not None:
                    return found
        return None

    def _received(self, manifest: Manifest, index: int) -> bool:
        """Take in a chunk; False if the version had to be given up."""
        reply = self._pulls.pop(index)
        error = reply.exception()
        try:
            if error is not None:
                raise error
            frames = reply.result().frames
            manifest.check(index, frames[0] if len(frames) == 1 else b"")
            self._chunks[index] = frames[0]
        except Damaged as damage:
            self._tries += 1
            _log.warning("chunk damaged", error=str(damage), tries=self._tries)
            if self._tries < TRIES:
                self._pulls[index] = self._watched(self._client.pull(manifest, index))
                return True
            self._ask()
            return False
        except WireError as gone:
            _log.warning("version given up", version=manifest.version, error=str(gone))
            self._ask()
            return False
        return True

    def _ask(self) -> None:
        self._manifest, self._pulls, self._chunks, self._tries = None, {}, {}, 0
        self._asked = self._watched(self._client.ask(self._version, self._wait_seconds))

    def _watched(self, pending: Pending) -> Pending:
        pending.add_done_callback(lambda _: self._on_reply())
        return pending
