"""Worker processes that kill or suspend themselves at a chosen point: `python dying_worker.py`, a line each on stdin.

A line is `ADDRESS NAME STAGE POINT`. This process forks a child for it, tells `NAME pid PID`, and `NAME ended STATUS`
when it has ended; it has no thread and no socket of its own, so a fork is safe and takes no time.
"""

import os
import signal
import sys

from brokers.channel import wait
from brokers.dealer import DealerChannel
from common import logs
from contract import SECONDS, Worker


def tell(*words: object) -> None:
    print(*words, flush=True)


def work(address: str, name: str, stage: str, point: str) -> None:
    """Do one group of a stage as its worker does, until `point` is reached."""

    def at(here: str) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    logs.configure("worker", level="error")  # not to where this process tells what happens
    channel = DealerChannel(address, name, "1", heartbeat_seconds=0.05)
    worker = Worker(channel, name)
    worker.hello(stage, "h", os.getpid(), seconds=SECONDS)
    channel.start_heartbeats()
    at("before")
    if stage == "prompt":
        wait(worker.offer(2, 3), SECONDS)
        at("added")
        return
    leases = worker.get(stage, 2, 0 if stage in ("rollout", "trainer") else None)
    assert leases, f"nothing to do for {stage}"
    at("leased")
    if point == "suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
        tell(name, "lost", *sorted(worker.finish(stage, leases)))
        fresh = worker.get(stage, 1, 0)
        tell(name, "lost", *worker.finish(stage, fresh), "of", *(leased.group.key.id for leased in fresh))
    elif stage in ("trainer", "evaluate"):
        worker.ack(leases, 0)
        at("acknowledged")
        worker.advance(1)
        at("advanced")
        worker.commit(1)
        at("committed")
    else:
        from contract import answer  # noqa: PLC0415

        results = [answer(stage, leased) for leased in leases]
        worker.confirm(worker.put(results, ack=False), results, ack=False)
        at("put")
        worker.ack(leases)
        at("acknowledged")
    channel.close(SECONDS)


def main() -> None:
    for line in sys.stdin:
        address, name, stage, point = line.split()
        child = os.fork()
        if child == 0:
            work(address, name, stage, point)
            os._exit(0)
        tell(name, "pid", child)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            tell(name, "stopped")
            _, status = os.waitpid(child, 0)
        tell(name, "ended", status)


if __name__ == "__main__":
    main()
