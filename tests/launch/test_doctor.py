"""Each finding of the doctor from what it is given; the machine itself only where it is the point."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launch import doctor
from launch.doctor import Check

pytestmark = pytest.mark.unit

HOME = Path(__file__).resolve().parent.parent.parent


def test_nothing_but_what_is_wrong_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    fine, note = Check("a", True, "here", "never shown"), Check("b", None, "absent", "install b")
    assert doctor.report([fine, note]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split() for line in told] == [
        ["ok", "a", "here"],
        ["note", "b", "absent"],
        ["->", "install", "b"],
        ["nothing", "is", "wrong"],
    ]
    assert doctor.report([fine, note, Check("c", False, "broken", "mend c")]) == 1
    assert "-> mend c" in capsys.readouterr().out


def test_a_foreign_package_of_our_name_is_reported_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("")
    (tmp_path / "workers.py").write_text("")
    (tmp_path / "brokers").mkdir()  # a folder without __init__.py gives way to a package
    found = doctor.import_names(HOME, [str(tmp_path), str(HOME)])
    assert [check.ok for check in found] == [False, False]
    assert f"'common' is found in {tmp_path / 'common'}" in found[0].found
    assert f"'workers' is found in {tmp_path / 'workers.py'}" in found[1].found
    (own,) = doctor.import_names(HOME, [str(HOME), str(tmp_path)])
    assert own.ok is True


def test_packages_that_cannot_be_found_at_all_are_reported(tmp_path: Path) -> None:
    found = doctor.import_names(HOME, [str(tmp_path)])
    assert ["nowhere" in check.found for check in found] == [True] * 4


def test_versions_are_compared_with_those_that_were_tested(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# tested\nPyZMQ==1.0.0\nmsgpack == 0.1 ; python_version > '3'\nnot a pin\n")
    assert doctor.constraints(file) == {"pyzmq": "1.0.0", "msgpack": "0.1"}
    found = {check.name: check for check in doctor.versions(doctor.constraints(file))}
    assert found["pyzmq"].ok is None
    assert found["pyzmq"].found.endswith(", tested with 1.0.0")
    assert found["pyarrow"].ok is True
    assert doctor.constraints(tmp_path / "absent.txt") == {}


def test_python_open_files_and_processors_have_their_bounds() -> None:
    assert doctor.python((3, 11, 0)).ok
    assert doctor.python((3, 10, 14)).ok is False
    assert doctor.open_files(1024).ok
    assert doctor.open_files(256).ok is False
    assert doctor.open_files(resource.RLIM_INFINITY).ok
    assert doctor.processors(2, {}).ok
    assert doctor.processors(2, {"OMP_NUM_THREADS": "1"}).ok
    assert doctor.processors(2, {"OMP_NUM_THREADS": "64"}).ok is None


def test_a_missing_shared_memory_or_host_name_is_a_note(tmp_path: Path) -> None:
    assert doctor.shared_memory(tmp_path / "absent").ok is None
    check = doctor.host_name("a-host-that-does-not-exist.invalid")
    assert check.ok is None
    assert "does not resolve" in check.found


def test_slurm_without_scontrol_is_wrong_inside_a_job_only() -> None:
    assert doctor.slurm(None, None, {}).ok is None
    assert doctor.slurm(None, "/usr/bin/sinfo", {"SLURM_JOB_ID": "7"}).ok is False
    assert doctor.slurm("/usr/bin/scontrol", None, {"SLURM_JOB_ID": "7"}).found == "/usr/bin/scontrol, job 7"


def test_a_broker_can_bind_on_this_machine_and_an_address_that_is_not_here_is_reported() -> None:
    assert doctor.loopback("tcp://127.0.0.1:0", required=True).ok
    # 203.0.113.0/24 is for documentation (RFC 5737): no interface has it
    assert doctor.loopback("tcp://203.0.113.1:0", required=True).ok is False
    assert doctor.loopback("tcp://203.0.113.1:0", required=False).ok is None


def test_a_look_at_this_machine_finds_every_kind_once_without_importing_torch() -> None:
    code = "import sys; from launch import doctor; doctor.report(doctor.checks()); print('torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for name in ("python", "import names", "pyzmq", "open files", "loopback IPv6", "address", "gpu", "slurm", "clock"):
        assert told.count(f" {name} ") == 1
    assert told.splitlines()[-1] == "False"
