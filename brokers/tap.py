"""Record the groups of a stage's queue while the run goes on: `python -m brokers.tap --broker ADDRESS --queue reward`.

The run does not notice: a tap takes nothing away and nobody waits for it. Any Arrow reader opens what it writes, and
`python -m workers.ROLE --replay DIR` works on it again.
"""

import argparse
import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

import structlog

from brokers.channel import Channel, Pending, Reply, wait
from brokers.dealer import DealerChannel
from brokers.journal import Event
from brokers.keys import read_worker_key
from brokers.recording import GRANT, RunFacts, Writer, new_folder
from brokers.tapping import BUFFER_BYTES
from common import logs
from common.errors import Damaged, Unreachable
from common.header import Header, Item, attach
from common.process import Stop, run_main
from common.section import Section

WAIT_SECONDS = 5.0
"""how long a question waits at the broker for the next group"""
ANSWER_SECONDS = 5.0
"""how long an answer may take beyond that"""
ALL = (1 << 62) - 1
"""number of a copy that is never reached: what is still to come is not wanted"""
TRIES = 3
"""how often bytes that arrived damaged are asked for again"""
LOOK_SECONDS = 0.1
"""how often the loop looks at its stop flag meanwhile"""

_log = structlog.get_logger(part="tap")


class Recorder:
    """One tap of `queue`, through any channel. It writes into `folder` what it is given.

    `groups`: stop after so many, None for no bound; `buffer_bytes`: what the broker may keep for it.
    """

    def __init__(
        self,
        channel: Channel,
        queue: str,
        folder: Path,
        *,
        run: str = "",
        groups: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._channel, self._queue, self._folder, self._run = channel, queue, folder, run
        self._most, self._buffer_bytes = groups, buffer_bytes
        self._writer: Writer | None = None
        self._earlier = 0  # dropped by brokers that were restarted since
        self._dropped = 0
        self._damaged = 0  # replies in a row
        self.groups = self.left = 0
        self.ended = False

    @property
    def dropped(self) -> int:
        """Groups that did not fit into the buffer."""
        return self._earlier + self._dropped

    @property
    def done(self) -> bool:
        """Whether everything that was wanted, or will ever come, is recorded."""
        return self._has_enough or (self.ended and not self.left)

    @property
    def _has_enough(self) -> bool:
        return self._most is not None and self.groups >= self._most

    def ask(self, seconds: float, *, end: bool = False) -> Pending:
        """Ask for what comes next; `end`: only for what the broker has already. Pass the reply to `take`."""
        have = ALL if self._has_enough else self.groups
        body = {"have": have, "bytes": self._buffer_bytes, "end": end}
        header = Header("tap", run=self._run, stage=self._queue, deadline_s=seconds, body=body)
        return self._channel.request(header, seconds=ANSWER_SECONDS)

    def take(self, reply: Reply) -> int:
        """Write down what a reply brought and return how many groups; damaged ones come again with the next."""
        body = reply.header.body
        if "facts" in body:
            self._begin(body["facts"])
        assert self._writer is not None, "the first reply to a tap tells of the run"
        if body["dropped"] > self._dropped:
            _log.warning("too slow: this record misses groups", dropped=self._earlier + body["dropped"])
        self._dropped, self.left = body["dropped"], body["left"]
        self.ended = body["state"] != "running"
        skip = max(0, self.groups - body["first"])  # sent again, although they had arrived
        items = reply.header.items[skip:]
        frames = reply.frames[sum(len(item.sections) for item in reply.header.items[:skip]) :]
        if self._most is not None:
            items = items[: self._most - self.groups]
            frames = frames[: sum(len(item.sections) for item in items)]
        try:
            pairs = attach(Header("", items=items), frames)
        except Damaged as error:
            self._damaged += 1
            if self._damaged == TRIES:
                raise
            _log.warning("damaged under way, asking again", error=str(error), attempt=self._damaged)
            self.left += len(items)
            return 0
        self._damaged = 0
        events = [self._event(item, list(sections.values())) for item, sections in pairs]
        if events:
            self._writer.write(events)
            self.groups += len(events)
        return len(events)

    def close(self) -> str:
        """Close the files; return in one line what they hold."""
        if self._writer is None:
            return f"recorded nothing of queue {self._queue!r}: the broker never answered"
        self._writer.close()
        return (
            f"recorded {self.groups} groups of queue {self._queue!r} of run {self._run}, "
            f"{self._writer.bytes} bytes, in {self._folder}; {self.dropped} dropped"
        )

    def _begin(self, facts: dict[str, str]) -> None:
        if self._writer is None:
            self._run = facts["run"]
            told = RunFacts(facts["run"], json.loads(facts["config"]), Path(facts["folder"]))
            self._writer = Writer(self._folder, told, self._queue)
            self._writer.write([])  # a record of nothing is a record, too
            return
        _log.warning("the broker had forgotten this tap: what was handed out in between is not recorded")
        self._earlier, self._dropped = self.dropped, 0

    def _event(self, item: Item, sections: list[Section]) -> Event:
        body = {
            "seq": item.seq,
            "purpose": item.purpose,
            "min_version": item.min_version,
            "attempt": item.attempt,
            "versions": [item.version_min, item.version_max],
            "tokens": item.tokens,
            "version": item.facts["version"],
        }
        return Event(GRANT, item.group, self._queue, body, sections)


def record(recorder: Recorder, stop: Stop, seconds: float | None, deadline: float) -> None:
    """Record until the run ends, enough is recorded, `seconds` are over or told to stop; then fetch the rest.

    Raises `Unreachable` when the broker gave no answer for `deadline` seconds.
    """
    until = time.monotonic() + seconds if seconds is not None else float("inf")

    def over() -> bool:
        return recorder.done or stop.is_set() or time.monotonic() >= until

    heard, asked = time.monotonic(), recorder.ask(WAIT_SECONDS)
    while not over():
        futures.wait([asked], max(0.0, min(LOOK_SECONDS, until - time.monotonic())))
        if not asked.done():
            continue
        try:
            recorder.take(wait(asked))
            heard = time.monotonic()
        except Unreachable as error:
            if time.monotonic() - heard > deadline + WAIT_SECONDS:
                raise
            _log.warning("no answer, asking again", error=str(error))
        if not recorder.done:
            asked = recorder.ask(WAIT_SECONDS)
    while not recorder.ended and (recorder.take(wait(recorder.ask(0.0, end=True))) or recorder.left):
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and record."""
    parser = argparse.ArgumentParser(prog="python -m brokers.tap", description=__doc__)
    parser.add_argument("--broker", required=True, metavar="ADDRESS", help="the sample broker, tcp://HOST:PORT")
    parser.add_argument("--queue", required=True, metavar="STAGE", help="whose groups: rollout, reward, trainer ...")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the record")
    parser.add_argument("--groups", type=int, metavar="N", help="stop after so many groups")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after so many seconds")
    parser.add_argument(
        "--buffer-bytes", type=int, default=BUFFER_BYTES, metavar="N", help="what the broker may keep for this tap"
    )
    parser.add_argument("--name", default=f"tap-{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--run", default="", help="refuse any other run")
    parser.add_argument("--key", metavar="FILE", help="keys/worker.key in the folder of an encrypted run")
    parser.add_argument("--deadline", type=float, default=30.0, metavar="SECONDS", help="for an answer of the broker")
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    logs.configure("tap", json_lines=args.log_json)
    folder = new_folder(Path(args.out))
    stop = Stop().install()
    key = read_worker_key(Path(args.key)) if args.key else None
    channel = DealerChannel(args.broker, args.name, uuid.uuid4().hex[:8], key=key)
    recorder = Recorder(channel, args.queue, folder, run=args.run, groups=args.groups, buffer_bytes=args.buffer_bytes)
    try:
        record(recorder, stop, args.seconds, args.deadline)
    finally:
        channel.close(drain_seconds=0.0)
        print(recorder.close(), flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
