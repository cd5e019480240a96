"""Looks at a machine before a run does: a line a finding and what to do about it. Changes nothing, imports no torch."""

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import zmq

from brokers import sockets
from common.errors import ConfigError

PACKAGES = ("common", "brokers", "workers", "launch")
DISTRIBUTIONS = {"pyzmq": True, "msgpack": True, "pyarrow": True, "torch": False, "transformers": False}
"""what is looked for -> whether every process needs it; the others are needed where models run"""
MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 1024
MIN_DISK_BYTES = 1 << 30
MIN_SHM_BYTES = 1 << 30
ELSEWHERE = ("203.0.113.1", 9)
"""an address of the documentation block (RFC 5737): it has a route wherever there is a default route, and no host"""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding. `ok`: None is a note, which is no fault. `remedy`: what to do where it is not ok."""

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def checks() -> list[Check]:
    """Look at everything; takes well under a second."""
    home = Path(__file__).resolve().parent.parent
    here = [] if sys.flags.safe_path else [str(Path.cwd())]  # `python -m` looks into the current folder first
    return [
        python(sys.version_info[:3]),
        *import_names(home, [*here, *sys.path]),
        *versions(constraints(home / "constraints.txt")),
        shared_memory(Path("/dev/shm")),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        disk(Path.cwd()),
        processors(len(os.sched_getaffinity(0)), os.environ),
        loopback("tcp://127.0.0.1:0", required=True),
        loopback("tcp://[::1]:0", required=False),
        host_name(socket.gethostname()),
        advertised(),
        gpu(shutil.which("nvidia-smi")),
        slurm(shutil.which("scontrol"), shutil.which("sinfo"), os.environ),
        clock(),
    ]


def report(found: Sequence[Check]) -> int:
    """Print the findings and the remedies; return 0 if nothing is wrong, else 1."""
    words = {True: "ok", False: "wrong", None: "note"}
    for check in found:
        print(f"{words[check.ok]:<6} {check.name:<14} {check.found}")
        if check.ok is not True and check.remedy:
            print(f"{'':<21} -> {check.remedy}")
    wrong = sum(check.ok is False for check in found)
    print(f"{wrong} of {len(found)} checks found something wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


def python(version: tuple[int, ...]) -> Check:
    """The version of the interpreter."""
    needed = ".".join(map(str, MIN_PYTHON))
    return Check("python", version >= MIN_PYTHON, ".".join(map(str, version)), f"use Python {needed} or newer")


def import_names(home: Path, search: Sequence[str]) -> list[Check]:
    """Whether a process that searches these folders finds our packages, those beside `home`/launch, or a namesake."""
    foreign: dict[str, str] = {}
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, list(search))
        places = (
            [] if spec is None else [*(spec.submodule_search_locations or ()), *([spec.origin] * bool(spec.origin))]
        )
        if str(home / name) not in (str(Path(place).resolve()) for place in places if place is not None):
            foreign[name] = str(places[0]) if places else "nowhere"
    if not foreign:
        return [Check("import names", True, f"{', '.join(PACKAGES)} from {home}")]
    return [
        Check(
            "import names",
            False,
            f"{name!r} is found in {place}, not in {home}",
            f"start elsewhere, uninstall what shadows it, or put {home} first in PYTHONPATH",
        )
        for name, place in foreign.items()
    ]


def constraints(path: Path) -> dict[str, str]:
    """Return distribution -> version from lines `name==version`; empty if there is no such file."""
    if not path.exists():
        return {}
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split(";")[0].split("==", 1) for line in lines if "==" in line)
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}


def versions(tested: Mapping[str, str]) -> list[Check]:
    """Installed versions against those that were tested; another one is a note, a missing one may be a fault."""
    found: list[Check] = []
    for name, is_required in DISTRIBUTIONS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            where = "every process needs it" if is_required else "needed where models train or generate"
            found.append(Check(name, False if is_required else None, f"missing; {where}", f"pip install {name}"))
            continue
        wanted = tested.get(name, version)
        is_tested = wanted in (version, version.split("+")[0])  # 2.8.0+cpu is a build of 2.8.0
        remedy = f"pip install {name}=={wanted}, or run the tests with {version}"
        found.append(
            Check(name, is_tested or None, version if is_tested else f"{version}, tested with {wanted}", remedy)
        )
    return found


def shared_memory(path: Path) -> Check:
    """Room for shared memory, which containers often make tiny."""
    if not path.exists():
        return Check("shared memory", None, f"no {path}", "mount a tmpfs there")
    usage = shutil.disk_usage(path)
    found = f"{path} {_gib(usage.total)}, {_gib(usage.free)} free"
    remedy = f"at least {_gib(MIN_SHM_BYTES)}: docker run --shm-size=8g, or remove stale files"
    return Check("shared memory", usage.free >= MIN_SHM_BYTES or None, found, remedy)


def open_files(limit: int) -> Check:
    """The soft limit of open files; every peer of a broker is one."""
    is_enough = limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"at most {limit}"
    return Check("open files", is_enough, found, f"ulimit -n {MIN_OPEN_FILES} or more")


def disk(folder: Path) -> Check:
    """Free room where runs write their checkpoints and metrics."""
    free = shutil.disk_usage(folder).free
    return Check("disk", free >= MIN_DISK_BYTES, f"{_gib(free)} free in {folder}", "free some, or set folder elsewhere")


def processors(count: int, environ: Mapping[str, str]) -> Check:
    """Processors of this process, and how many threads each process of a run will take."""
    threads = environ.get("OMP_NUM_THREADS")
    found = f"{count}, OMP_NUM_THREADS {threads or 'not set: processes of a run get 1'}"
    is_fine = threads is None or (threads.isdigit() and int(threads) <= count)
    return Check(
        "processors", is_fine or None, found, f"processes that share {count} processors want fewer threads each"
    )


def loopback(endpoint: str, *, required: bool) -> Check:
    """Whether a broker could bind here; IPv6 may be absent."""
    name = "loopback IPv6" if "[" in endpoint else "loopback IPv4"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            sockets.prepare(probe, high_water_mark=1)
            return Check(name, True, sockets.bind(probe, endpoint))
        except ConfigError as error:
            return Check(
                name, False if required else None, str(error), "bring the loopback interface up: ip link set lo up"
            )


def host_name(name: str) -> Check:
    """Whether this machine can look up its own name."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        remedy = f"other machines need an address instead; or add {name} to /etc/hosts"
        return Check("host name", None, f"{name} does not resolve: {error.strerror}", remedy)
    is_local = all(address.startswith("127.") or address == "::1" for address in addresses)
    remedy = "other machines cannot reach it by this name: give them an address"
    return Check("host name", None if is_local else True, f"{name} is {', '.join(sorted(addresses))}", remedy)


def advertised() -> Check:
    """The address by which other machines reach this one, and why: that of the interface with the default route.

    Connecting a UDP socket asks the routing table and sends nothing.
    """
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:
            found = f"none: no default route (interfaces {interfaces}); runs stay on this machine"
            return Check("address", None, found, "set broker.host to an address of this machine that others reach")
        address = probe.getsockname()[0]
    found = f"{address}, which has the default route (interfaces {interfaces}); broker.host decides"
    return Check("address", True, found)


def gpu(nvidia_smi: str | None) -> Check:
    """Whether there are signs of a GPU; none is needed."""
    found = f"driver tools at {nvidia_smi}" if nvidia_smi else "none found; models run on processors"
    return Check("gpu", True if nvidia_smi else None, found)


def slurm(scontrol: str | None, sinfo: str | None, environ: Mapping[str, str]) -> Check:
    """Whether SLURM is here; inside a job it must be."""
    job = environ.get("SLURM_JOB_ID")
    if job and not scontrol:
        remedy = "put scontrol on the PATH of the job: the node list cannot be read without it"
        return Check("slurm", False, f"job {job}, but no scontrol", remedy)
    if not scontrol and not sinfo:
        return Check("slurm", None, "not here; runs start on this machine")
    return Check("slurm", True, f"{scontrol or sinfo}{f', job {job}' if job else ''}")


def clock() -> Check:
    """Whether the clock of leases and deadlines never goes back."""
    info = time.get_clock_info("monotonic")
    first, second = time.monotonic(), time.monotonic()
    found = f"{info.implementation}, resolution {info.resolution:g} s"
    return Check("clock", info.monotonic and second >= first, found, "leases need a monotonic clock")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
