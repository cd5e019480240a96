"""The loop of every stage that answers groups one for one: lease, handle, put, ack, until told to stop."""

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import ClassVar, Protocol

from brokers.channel import wait
from brokers.client import Leased, Result, SampleClient
from common.errors import Reject
from common.group import Group
from common.section import Section

WAIT_SECONDS = 1.0
"""how long a lease request waits at the broker"""
LOOK_SECONDS = 0.1
"""how often the loop looks at its stop flag meanwhile"""


class Stage(Protocol):
    """A step of the pipeline. `requires` and `adds` are columns; the order of the stages follows from them."""

    requires: ClassVar[frozenset[str]]
    adds: ClassVar[frozenset[str]]

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        """Return one section per group, in order.

        `Reject` concerns one group, which is given back; anything else ends the process, and the leases expire.
        """
        ...


def run(name: str, stage: Stage, client: SampleClient, over: Callable[[], bool], want: int) -> int:
    """Serve the queue `name` until `over()`, up to `want` groups at a time; return how many groups were handled."""
    handled = 0
    while not over():
        asked = client.request_lease(name, want, WAIT_SECONDS)
        while not asked.done() and not over():
            futures.wait([asked], LOOK_SECONDS)
        if not asked.done():
            break  # what the broker may still grant goes back when this worker says goodbye
        batch = client.take(wait(asked))
        if batch.ended:
            break
        results = answer(stage, batch.leases, client)
        if results:
            client.confirm(client.put(results), results)
        handled += len(results)
        client.channel.pulse.report(groups=handled)
    return handled


def answer(stage: Stage, leases: Sequence[Leased], client: SampleClient) -> list[Result]:
    """Handle groups together; if one of them is rejected, one by one, and give back those that cannot be handled."""
    if not leases:
        return []
    try:
        sections = stage.handle([leased.group for leased in leases])
    except Reject as error:
        if len(leases) == 1:
            client.nack(leases, error.reason)
            return []
        return [result for leased in leases for result in answer(stage, [leased], client)]
    return [Result(leased, (section,)) for leased, section in zip(leases, sections, strict=True)]
