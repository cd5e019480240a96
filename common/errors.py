"""The one error tree; each leaf says who must act and how the process ends.

RelaxError                                                                       exit 1
├── ConfigError    edit the configuration; names the setting                     exit 2
├── WireError      peers disagree (protocol, run id, schema)                     exit 3
│   ├── Stranger       the broker does not know this worker: say hello, again if it was restarted
│   └── Damaged        bytes changed or went missing under way; asked for again
├── BrokerError    the broker did not do what was asked                          exit 4
│   ├── Unreachable    no answer; names endpoint, verb and seconds
│   ├── QueueFull      a bound was reached and no room came; names queue and bound
│   └── LeaseLost      the group was given to somebody else in the meantime
├── Reject         this group only; the worker is fine -> nack(reason)           exit 1
└── WorkerError    this process cannot go on                                     exit 5
"""

from typing import ClassVar


class RelaxError(Exception):
    """Base of every error this system raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(RelaxError):
    """The user's configuration cannot work; the message names the setting and what to write instead."""

    exit_code = 2


class WireError(RelaxError):
    """Two peers disagree about protocol, run, schema, length or checksum. Nothing was accepted."""

    exit_code = 3


class Stranger(WireError):
    """The broker does not know the worker. It was never told, or it is a new one in the place of one that died."""


class Damaged(WireError):
    """Length or checksum differ from what the header announced; sending again helps."""


class BrokerError(RelaxError):
    """A broker refused or failed to serve a request."""

    exit_code = 4


class Unreachable(BrokerError):
    """No answer from an endpoint within the deadline."""


class QueueFull(BrokerError):
    """A queue stayed at its bound until the deadline of the put."""


class LeaseLost(BrokerError):
    """The lease ended before its result arrived; somebody else owns the group now."""


class Reject(RelaxError):
    """This one group cannot be handled; the worker goes on with the next."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerError(RelaxError):
    """This process cannot go on; its leases go back to the broker."""

    exit_code = 5


_BY_NAME: dict[str, type[RelaxError]] = {
    kind.__name__: kind
    for kind in (
        RelaxError,
        ConfigError,
        WireError,
        Stranger,
        Damaged,
        BrokerError,
        Unreachable,
        QueueFull,
        LeaseLost,
        WorkerError,
    )
}


def from_wire(kind: str, message: str) -> RelaxError:
    """Rebuild the error that a peer reported; an unknown kind becomes a plain `BrokerError`."""
    return _BY_NAME.get(kind, BrokerError)(message)
