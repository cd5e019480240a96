"""What SLURM says about a job, and how a run is submitted to it. Pure functions of values; `scontrol` is passed in."""

import ipaddress
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from common.errors import ConfigError

HOME = Path(__file__).resolve().parent.parent
"""the folder that launch/ and configs/ lie in"""
COMMAND_SECONDS = 30.0
"""how long a command of SLURM may take: a busy controller answers late, a dead one never"""
NO_SCONTROL = "the head's address is not guessed: put scontrol on the PATH of the job, or give --host ADDRESS"

Command: TypeAlias = Callable[[Sequence[str]], str]
"""(command line) -> what it printed; raises `ConfigError` when it fails"""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One node's view of a job. `node`: its index from 0. `restarts`: how often the job was requeued.

    `node_list` is in SLURM's short form, `n[1-3]`; `folder` is where the job was submitted, an absolute path.
    """

    id: str
    restarts: int
    nodes: int
    node: int
    node_list: str
    folder: Path

    def run_of(self, name: str) -> str:
        """Return the id that all nodes give to a run of this name; a requeued job is another run."""
        return f"{name}-{self.id}" + (f"-{self.restarts}" if self.restarts else "")


def read(environ: Mapping[str, str]) -> SlurmJob:
    """Return the job that a task with this environment belongs to.

    Raises `ConfigError` outside of a job, or when the step is not one task on every node of it.
    """
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST", "SLURM_SUBMIT_DIR"):
        if name not in environ:
            raise ConfigError(f"{name} is not set: this is for a task of a SLURM job, sbatch launch/async.slurm CONFIG")
    nodes = _count(environ, "SLURM_NNODES")
    if (per_node := _count(environ, "SLURM_NTASKS_PER_NODE", 1)) > 1:
        raise ConfigError(f"SLURM_NTASKS_PER_NODE = {per_node}: one task a node starts all others, --ntasks-per-node=1")
    if (tasks := _count(environ, "SLURM_STEP_NUM_TASKS", nodes)) != nodes:
        raise ConfigError(f"{tasks} tasks on the {nodes} nodes of the job: start one on every node, --ntasks={nodes}")
    return SlurmJob(
        environ["SLURM_JOB_ID"],
        _count(environ, "SLURM_RESTART_COUNT", 0),
        nodes,
        _count(environ, "SLURM_NODEID"),
        environ["SLURM_JOB_NODELIST"],
        Path(environ["SLURM_SUBMIT_DIR"]).absolute(),
    )


def run_command(command: Sequence[str]) -> str:
    """Run a command of SLURM and return what it printed; raises `ConfigError` with its words when it fails or hangs."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command)} gave no answer within {COMMAND_SECONDS:g} s") from error
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip()
        raise ConfigError(f"{' '.join(command)} ended with code {done.returncode}: {words}")
    return done.stdout


def hosts(job: SlurmJob, command: Command = run_command) -> tuple[str, ...]:
    """Return the names of the job's nodes, in the order of their indices; raises `ConfigError` without `scontrol`."""
    try:
        names = tuple(command(("scontrol", "show", "hostnames", job.node_list)).split())
    except ConfigError as error:
        raise ConfigError(f"{error}; {NO_SCONTROL}") from error
    if len(names) != job.nodes:  # scontrol ends with code 0 also when it could not read the list
        raise ConfigError(
            f"scontrol expands {job.node_list!r} to {len(names)} names, SLURM_NNODES = {job.nodes}; {NO_SCONTROL}"
        )
    return names


def head_address(job: SlurmJob, command: Command = run_command) -> str:
    """Return the IP address of the job's first node, for brokers to bind and for all nodes to reach.

    Node names need not resolve, so the controller is asked (NodeAddr). SLURM_LAUNCH_NODE_IPADDR is of no use: it is
    the machine that srun runs on, which may be a login node. Raises `ConfigError` where no address can be told.
    """
    first = hosts(job, command)[0]
    try:
        told = command(("scontrol", "--oneliner", "show", "node", first))
    except ConfigError as error:
        raise ConfigError(f"{error}; {NO_SCONTROL}") from error
    found = re.search(r"\bNodeAddr=(\S+)", told)
    if found is None:
        raise ConfigError(f"scontrol tells no NodeAddr of node {first}: {told.strip()!r}; {NO_SCONTROL}")
    return _numeric(found[1], first, alone=job.nodes == 1)


def submission(
    script: Path, config: Path, python: Path, root: Path, nodes: int, overrides: Sequence[str], options: Sequence[str]
) -> list[str]:
    """Return the command line that submits a run: all paths absolute, so it is the same from every folder."""
    for path in (script, config, python, root):
        assert path.is_absolute(), f"a job must not depend on where it is submitted: {path}"
    settings = [word for override in overrides for word in ("--set", override)]
    return [
        "sbatch",
        f"--nodes={nodes}",
        f"--chdir={root}",
        f"--export=ALL,RELAXQ_HOME={HOME},RELAXQ_PYTHON={python}",
        *options,
        str(script),
        str(config),
        f"--root={root}",
        *settings,
    ]


def _numeric(address: str, node: str, *, alone: bool) -> str:
    """Return an address in digits: brokers cannot bind a name. `alone`: no other node has to reach it."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ConfigError(f"NodeAddr {address} of node {node} does not resolve: {error.strerror}; --host") from error
    reachable = [text for text in found if alone or not ipaddress.ip_address(text.split("%")[0]).is_loopback]
    if not reachable:
        raise ConfigError(
            f"NodeAddr {address} of node {node} is {', '.join(sorted(set(found)))} here, "
            "which other nodes cannot reach; give --host ADDRESS or set broker.host"
        )
    return reachable[0]


def _count(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ConfigError(f"{name} = {text!r}: expected a number")
    return int(text)
