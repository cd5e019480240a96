"""What every process does alike."""

import json
import signal
from pathlib import Path

import pytest

from common.errors import ConfigError, Unreachable
from common.process import Stop, run_main, write_atomically

pytestmark = pytest.mark.unit


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    write_atomically(path, {"port": 1})
    before = path.stat().st_ino
    write_atomically(path, {"port": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"port": 2}
    assert path.stat().st_ino != before  # a new file took the name: who reads the old one reads all of it
    write_atomically(path, "text as it is")
    assert path.read_text(encoding="utf-8") == "text as it is"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    with pytest.raises(TypeError):
        write_atomically(path, {"x": object()})
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text(encoding="utf-8") == "old"


def test_an_error_of_ours_ends_as_one_line_a_mistake_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ConfigError("unknown setting 'a'\nsetting 'b' is missing")

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ConfigError: unknown setting 'a'\nConfigError: setting 'b' is missing\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_a_main_that_returns_ends_with_its_code(returned: int | None, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: returned)
    assert ended.value.code == code


def test_an_error_that_is_not_ours_is_not_hidden() -> None:
    def unreachable() -> None:
        raise Unreachable("no reply within 2 s")

    def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(SystemExit) as ended:
        run_main(unreachable)
    assert ended.value.code == 4
    with pytest.raises(ZeroDivisionError):
        run_main(bug)


def test_a_signal_sets_the_flag_and_a_second_interrupt_ends_at_once() -> None:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = Stop().install()
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        assert stop.wait(60.0)  # returns at once
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
