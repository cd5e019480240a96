"""A real SLURM cluster of several nodes on one host, without a service manager, for tests.

Needs root, the packages named in tests/apt.txt, and nothing that is already running: every cluster has a munged of its
own (its own key and socket, as user munge), so that a munged of the host is neither needed nor touched and clusters
that run at the same time do not stop each other's. Jobs see nodes n1..nN, which share this host's address, files and
ports; SLURMD_NODENAME tells them apart.
"""

import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Final, Self

START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 20.0
COMMAND_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.2
CPUS_PER_NODE: Final = 4
KILL_WAIT_S: Final = 30
LOG_TAIL_LINES: Final = 15

ACTIVE_STATES: Final = frozenset(
    {
        "COMPLETING",
        "CONFIGURING",
        "PENDING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "RESV_DEL_HOLD",
        "RUNNING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
    }
)
"""Values of JobState that a job can still leave; every other value is final."""

_DAEMON_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# ReturnToService: a node that was slow to answer comes back by itself. MinJobAge (s): ended jobs stay visible;
# 0 keeps them for a few seconds only, whatever slurm.conf(5) says.
# config_overrides: nodes may declare more CPUs than the host has, which would drain them otherwise.
# batch_sched_delay=0: without it a batch job waits for up to 3 s before it is looked at.
_CONF: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
MinJobAge=86400
KillWait={kill_wait}
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={directory}/state
SlurmdSpoolDir={run}/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldPort={port}
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
{node_lines}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(RuntimeError):
    """A SLURM daemon or command failed; the message quotes what it printed or logged."""


class SlurmCluster:
    """A cluster of nodes n1..nN with one partition; a context manager that starts and stops it.

    Each node declares CPUS_PER_NODE CPUs whatever the host has, so that several jobs can share a node; keep tasks small
    (OMP_NUM_THREADS=1). The logs (slurmctld.log, slurmd-nX.log, NAME.err), slurm.conf and by default the jobs' output
    files (job-ID.out) lie in the directory and stay there. It can be entered again after it was left: that is a new
    cluster, whose jobs count from 1 again.
    """

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        """Prepare a cluster of that many nodes (at least 1) in the directory, which is made when the cluster starts.

        ValueError: no nodes, or a directory whose path has characters that slurm.conf cannot hold.
        """
        self.directory: Final = directory.resolve()
        if nodes < 1:
            raise ValueError(f"a cluster needs at least 1 node, not {nodes}")
        if re.fullmatch(r"[\w./+-]+", str(self.directory)) is None:
            raise ValueError(f"slurm.conf cannot hold this path: {str(self.directory)!r}")
        self.node_names: Final = tuple(f"n{i + 1}" for i in range(nodes))
        self._conf: Final = self.directory / "slurm.conf"
        self._daemons: Final[dict[str, subprocess.Popen[bytes]]] = {}
        self._run: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """The variables to merge into the environment of a command that is to use this cluster."""
        return {"SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Self:
        """Start the cluster and wait until all nodes are idle.

        SlurmError: a program is missing, not root, a daemon ended, or not idle within START_DEADLINE_S seconds; it
        quotes the ends of the logs, and nothing is left running. RuntimeError: it is running already.
        """
        if self._run is not None:
            raise RuntimeError(f"the cluster in {self.directory} is running already")
        _require_programs()
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill the jobs that are left and stop the daemons: a few seconds, or a minute or two if they hang."""
        self._stop()

    def sbatch(
        self,
        script: Path | str,
        *args: str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> int:
        """Submit a batch script (a path) with its arguments, and give the job's id.

        env is merged into this process's environment (less its SLURM_ and SBATCH_ variables), which the job gets;
        options are sbatch's own ("--nodes=3") and win over the #SBATCH lines. Output goes to DIRECTORY/job-ID.out
        unless options say otherwise. SLURM_SUBMIT_DIR is this process's current folder.
        SlurmError: sbatch refused, with its message.
        """
        output = f"--output={self.directory}/job-%j.out"
        answer = self._command("sbatch", "--parsable", output, *options, "--", str(script), *args, env=env)
        return int(answer.strip().partition(";")[0])

    def state(self, job_id: int) -> str:
        """The job's JobState now, such as PENDING, RUNNING, COMPLETED, FAILED or CANCELLED; ended jobs stay visible.

        SlurmError: no such job.
        """
        return self._job_field(job_id, "JobState").split()[0]

    def wait(self, job_id: int, deadline_s: float) -> str:
        """Wait until the job has ended and give its final state (COMPLETED, FAILED, CANCELLED, TIMEOUT, ...).

        TimeoutError: it had not ended deadline_s seconds from now; quotes the job, its output and the logs.
        SlurmError: no such job.
        """
        end = time.monotonic() + deadline_s
        pause = Event()
        while (state := self.state(job_id)) in ACTIVE_STATES:
            if time.monotonic() >= end:
                job = self._command("scontrol", "show", "job", str(job_id))
                output = _tail(Path(self._job_field(job_id, "StdOut")))
                raise TimeoutError(
                    f"job {job_id} is {state} after {deadline_s} s\n{job}\n{output}\n{self._log_tails()}"
                )
            _ = pause.wait(POLL_S)
        return state

    def cancel(self, job_id: int) -> None:
        """Ask for the job's end (scancel): SIGTERM now to all its processes, SIGKILL after KILL_WAIT_S seconds.

        Does not wait for it, and says nothing if the job has ended. SlurmError: no such job.
        """
        # scancel itself exits 0 for a job that it does not know.
        _ = self.state(job_id)
        _ = self._command("scancel", str(job_id))

    def output(self, job_id: int) -> str:
        """What the job's batch script and its tasks printed so far; empty while there is no output file.

        SlurmError: no such job.
        """
        path = Path(self._job_field(job_id, "StdOut"))
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _job_field(self, job_id: int, name: str) -> str:
        job = self._command("scontrol", "show", "job", str(job_id))
        found = re.search(rf"^\s+{name}=(.*)$", job, re.MULTILINE)
        if found is None:
            raise SlurmError(f"scontrol says no {name} for job {job_id}:\n{job}")
        return found[1]

    def _command(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a SLURM command on this cluster and give its standard output; SlurmError if it fails or hangs."""
        try:
            done = subprocess.run(
                command,
                env=_clean_environment() | dict(env or {}) | self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmError(f"{command} did not end in {COMMAND_DEADLINE_S} s\n{self._log_tails()}") from error
        if done.returncode != 0:
            raise SlurmError(f"{command} exited {done.returncode}: {done.stderr.strip()} {done.stdout.strip()}")
        return done.stdout

    def _start(self) -> None:
        # slurmctld's -c keeps an earlier cluster's last job id.
        shutil.rmtree(self.directory / "state", ignore_errors=True)
        (self.directory / "state").mkdir(parents=True)
        # A short path of its own: it holds Unix sockets, whose paths end at 107 bytes, and user munge must reach it,
        # which cannot enter pytest's temporary folders.
        self._run = run = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        run.chmod(0o755)
        _ = self._conf.write_text(self._conf_text(run), encoding="utf-8")
        self._start_munge(run)
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for name in self.node_names:
            (run / name).mkdir(mode=0o755)
            self._spawn(f"slurmd-{name}", ["slurmd", "-D", "-N", name])
        self._await(self._all_idle, "all nodes idle")

    def _conf_text(self, run: Path) -> str:
        host = socket.gethostname().partition(".")[0]
        port, *node_ports = _free_ports(1 + len(self.node_names))
        common = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={CPUS_PER_NODE} State=UNKNOWN"
        node_lines = "\n".join(
            f"NodeName={name} Port={node_port} {common}"
            for name, node_port in zip(self.node_names, node_ports, strict=True)
        )
        return _CONF.format(
            host=host, run=run, directory=self.directory, port=port, node_lines=node_lines, kill_wait=KILL_WAIT_S
        )

    def _start_munge(self, run: Path) -> None:
        munge = run / "munge"
        munge.mkdir(mode=0o700)
        shutil.chown(munge, "munge", "munge")
        # munged makes its socket and lock here as user munge; the socket itself has to be open to all.
        shutil.chown(run, "munge", "munge")
        key = munge / "key"
        keyed = subprocess.run(
            ["mungekey", "--create", f"--keyfile={key}"],
            env={"PATH": _DAEMON_PATH},
            user="munge",
            group="munge",
            extra_groups=(),
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        if keyed.returncode != 0:
            raise SlurmError(f"mungekey exited {keyed.returncode}: {keyed.stderr}")
        files = [f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log"]
        socket_file = run / "munge.socket"
        options = ["--foreground", f"--socket={socket_file}", f"--key-file={key}", *files]
        self._spawn("munged", ["munged", *options], user="munge")
        self._await(socket_file.is_socket, "munged's socket")

    def _spawn(self, name: str, command: Sequence[str], user: str | None = None) -> None:
        """Start a daemon in the foreground as a child, so that its pid is certain; its stderr goes to NAME.err."""
        with (self.directory / f"{name}.err").open("wb") as err:
            self._daemons[name] = subprocess.Popen(
                command,
                env={"PATH": _DAEMON_PATH} | self.env,
                cwd="/",
                user=user,
                group=user,
                extra_groups=None if user is None else (),
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                # Ctrl-C in a terminal must reach the test run only: it cancels the jobs before the daemons stop.
                start_new_session=True,
            )

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_DEADLINE_S
        pause = Event()
        while not ready():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise SlurmError(f"{name} exited {daemon.returncode} at the start\n{self._log_tails()}")
            if time.monotonic() >= end:
                raise SlurmError(f"not reached in {START_DEADLINE_S} s: {what}\n{self._log_tails()}")
            _ = pause.wait(POLL_S)

    def _all_idle(self) -> bool:
        try:
            nodes = self._command("sinfo", "--noheader", "--Node", "--format=%N %T")
        except SlurmError:
            # slurmctld does not listen yet.
            return False
        return sorted(nodes.splitlines()) == sorted(f"{name} idle" for name in self.node_names)

    def _log_tails(self) -> str:
        """The ends of the daemons' logs, for an error message; NAME.err where a daemon has not opened its log."""
        parts: list[str] = []
        for name in ("munged", "slurmctld", *(f"slurmd-{node}" for node in self.node_names)):
            log = self.directory / f"{name}.log"
            parts.append(_tail(log if log.exists() else log.with_suffix(".err")))
        return "\n".join(parts)

    def _stop(self) -> None:
        """Stop what was started, the last first; each step is tried even if an earlier one failed."""
        run = self._run
        if run is None:
            return
        with ExitStack() as stack:
            # Run in reverse order.
            _ = stack.callback(setattr, self, "_run", None)
            _ = stack.callback(shutil.rmtree, run, ignore_errors=True)
            _ = stack.callback(_kill_leftovers, self._conf)
            _ = stack.callback(self._stop_daemons)
            _ = stack.callback(self._kill_jobs)

    def _kill_jobs(self) -> None:
        """Kill all jobs and wait, at most STOP_DEADLINE_S seconds, until no node runs a part of one."""
        controller = self._daemons.get("slurmctld")
        if controller is None or controller.poll() is not None:
            return
        end = time.monotonic() + STOP_DEADLINE_S
        pause = Event()
        while time.monotonic() < end:
            try:
                jobs = self._command("squeue", "--noheader", "--format=%A").split()
            except SlurmError:
                # It does not answer; _kill_leftovers ends the processes all the same.
                return
            if not jobs:
                return
            # Both, since scancel leaves tasks that ignore SIGTERM alone for KillWait, even with --signal=KILL.
            # slurmstepd has to live: it reports the end. A job that has just ended may be refused.
            with suppress(SlurmError):
                _ = self._command("scancel", "--quiet", *jobs)
            _kill(_job_processes(self._conf, with_slurmstepd=False))
            _ = pause.wait(POLL_S)

    def _stop_daemons(self) -> None:
        end = time.monotonic() + STOP_DEADLINE_S
        for group in ("slurmd", "slurmctld", "munged"):
            daemons = [daemon for name, daemon in self._daemons.items() if name.startswith(group)]
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                try:
                    _ = daemon.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    _ = daemon.wait()
        self._daemons.clear()


def _require_programs() -> None:
    if os.geteuid() != 0:
        raise SlurmError("a SLURM test cluster needs root")
    programs = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue", "srun")
    missing = [name for name in programs if shutil.which(name, path=_DAEMON_PATH) is None]
    if missing:
        raise SlurmError(f"not installed: {', '.join(missing)}; install the packages named in tests/apt.txt")
    try:
        _ = pwd.getpwnam("munge")
    except KeyError as error:
        raise SlurmError("no user munge; install the packages named in tests/apt.txt") from error


def _clean_environment() -> dict[str, str]:
    """The environment of this process without what would steer SLURM's commands, as it does inside a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}


def _free_ports(count: int) -> list[int]:
    """Distinct ports that were free just now: SLURM cannot bind port 0 and tell which it got.

    They lie below Linux's usual range for port 0 and outgoing connections (32768 up), so that none of those takes one
    between here and a daemon's own bind.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(12000, 32000), 20000):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise SlurmError("no free ports from 12000 to 31999")


def _tail(path: Path) -> str:
    """The last LOG_TAIL_LINES lines of a file under a heading with its path."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(no such file)"
    return "\n".join([f"--- {path}", *text.splitlines()[-LOG_TAIL_LINES:]])


def _kill_leftovers(conf: Path) -> None:
    """Kill the processes of this cluster's jobs that outlived slurmd, such as ones that had left their step's tree.

    Gives up after STOP_DEADLINE_S seconds.
    """
    end = time.monotonic() + STOP_DEADLINE_S
    pause = Event()
    while (pids := _job_processes(conf, with_slurmstepd=True)) and time.monotonic() < end:
        _kill(pids)
        _ = pause.wait(POLL_S)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _job_processes(conf: Path, *, with_slurmstepd: bool) -> list[int]:
    """The pids known by their environment: the cluster's own slurm.conf, and a job's id or the name slurmstepd."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            is_stepd = (entry / "comm").read_bytes().strip() == b"slurmstepd"
        except OSError:
            # It ended meanwhile.
            continue
        if f"SLURM_CONF={conf}".encode() not in variables:
            continue
        if with_slurmstepd if is_stepd else any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables):
            pids.append(int(entry.name))
    return pids
