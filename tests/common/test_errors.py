"""The error tree: each kind has its exit code, and travels between processes as itself."""

import pytest

from common import errors
from common.errors import RelaxError, from_wire

pytestmark = pytest.mark.unit

CODES = {
    "RelaxError": 1,
    "ConfigError": 2,
    "WireError": 3,
    "Damaged": 3,
    "Stranger": 3,
    "BrokerError": 4,
    "Unreachable": 4,
    "QueueFull": 4,
    "LeaseLost": 4,
    "WorkerError": 5,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_a_reported_error_is_rebuilt_with_its_kind_its_words_and_its_exit_code(name: str, code: int) -> None:
    error = from_wire(name, "queue 'rollout' is full")
    assert type(error).__name__ == name
    assert str(error) == "queue 'rollout' is full"
    assert error.exit_code == code


def test_the_table_above_holds_every_error() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RelaxError)}
    assert kinds == CODES.keys() | {"Reject"}


def test_an_unknown_kind_is_a_plain_broker_error() -> None:
    assert type(from_wire("KeyError", "x")) is errors.BrokerError
    assert type(from_wire("Exception", "x")) is errors.BrokerError


def test_a_reject_carries_its_reason() -> None:
    assert errors.Reject("15 placeholders, 16 expected").reason == "15 placeholders, 16 expected"
