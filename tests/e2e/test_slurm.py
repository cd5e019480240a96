"""The batch scripts on a real SLURM cluster of three nodes: train, join from another job, be cancelled, fail.

sync.slurm and hybrid.slurm differ from async.slurm by the mode alone, so each is run in the test that needs the least
of it: a configuration that contradicts the mode, and a run that is ended early.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest

from brokers.client import SampleClient
from brokers.dealer import DealerChannel
from common.errors import BrokerError
from runs import FAKE, TINY, accounted, with_model
from tests.slurm_cluster import KILL_WAIT_S, SlurmCluster

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"RELAXQ_HOME": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
"""what a user exports before sbatch; the reward `paced` can be imported"""
SMALL = ("algorithm.kl=0", "evaluation.prompts=0", "broker.lease_seconds=30")
"""fewer processes to start: no reference model, no held-out prompts"""
HALF_A_NODE = ("--cpus-per-task=2",)
"""so that another job finds room on the same nodes"""
START_SECONDS = 120.0
"""for a job to begin and its processes to import torch side by side; far more than they take on a machine at rest"""
STEPS = 80
"""of 16 samples that take 0.05 s each: a minute for another worker to come, unless told to hurry"""

Found = TypeVar("Found")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: SlurmCluster, script: str, root: Path, *settings: str) -> int:
    words = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    command = (ROOT / "launch" / script, str(TINY), "--root", str(root), *words)
    return cluster.sbatch(*command, env=ENVIRONMENT, options=HALF_A_NODE)


def await_(cluster: SlurmCluster, job: int, look: Callable[[], Found | None], what: str) -> Found:
    """Return what `look` finds; fails with the job's output when the job ends or the time is over before."""
    until, pause = time.monotonic() + START_SECONDS, Event()
    while (found := look()) is None:
        state = cluster.state(job)
        if time.monotonic() >= until or state not in ("PENDING", "RUNNING"):
            pytest.fail(f"no {what}; job {job} is {state}:\n{cluster.output(job)}")
        pause.wait(0.2)
    return found


def address_in(folder: Path) -> str | None:
    path = folder / "broker.json"
    return json.loads(path.read_text())["address"] if path.exists() else None


def rollouts(client: SampleClient) -> list[dict[str, Any]]:
    try:
        return [worker for worker in client.status(seconds=2.0)["workers"] if worker["role"] == "rollout"]
    except BrokerError:
        return []  # a busy machine: asked again


def processes_of(cluster: SlurmCluster, job: int) -> list[str]:
    """Command lines of what the job has started and is still there."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={cluster.env['SLURM_CONF']}".encode()}
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marks <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile
    return found


@dataclass(frozen=True)
class Trained:
    """A run that has ended, its job and the job that joined it. `rollouts`: those that took part in its middle."""

    folder: Path
    job: int
    joined: int
    states: tuple[str, str]
    rollouts: frozenset[str]


@pytest.fixture(scope="module")
def trained(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    hurry, folder = root / "hurry", root / "runs" / "tiny"
    paced = f'reward={{name="paced:Paced", seconds=0.05, until="{hurry}"}}'
    job = submit(cluster, "async.slurm", root, f"steps={STEPS}", paced)
    address = await_(cluster, job, lambda: address_in(folder), "sample broker")
    joined = cluster.sbatch(ROOT / "launch" / "rollout.slurm", address, env=ENVIRONMENT, options=HALF_A_NODE)
    channel = DealerChannel(address, "watcher", "1")
    client = SampleClient(channel, "watcher")

    def generating() -> frozenset[str] | None:
        names = frozenset(worker["name"] for worker in rollouts(client) if worker["progress"].get("tokens", 0) > 0)
        return names if len(names) == 3 else None

    try:
        names = await_(cluster, job, generating, "third rollout worker that generates")
    finally:
        channel.close(drain_seconds=0.0)
    hurry.touch()
    states = (cluster.wait(job, START_SECONDS), cluster.wait(joined, START_SECONDS))
    return Trained(folder, job, joined, states, names)


def test_a_job_trains_to_its_end_and_accounts_for_every_group(cluster: SlurmCluster, trained: Trained) -> None:
    assert trained.states[0] == "COMPLETED", cluster.output(trained.job)
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert (summary["run"], summary["state"], summary["steps"]) == (f"tiny-{trained.job}", "finished", STEPS)
    assert summary["groups"]["trained"] == 4 * STEPS
    assert accounted(summary["groups"])


def test_a_rollout_worker_of_another_job_takes_part_and_leaves_with_the_run(
    cluster: SlurmCluster, trained: Trained
) -> None:
    assert {"rollout-0", "rollout-1"} < trained.rollouts
    assert trained.states[1] == "COMPLETED", cluster.output(trained.joined)


def test_nothing_that_ended_well_wrote_a_traceback(cluster: SlurmCluster, trained: Trained) -> None:
    logs = {path.name: path.read_text() for path in (trained.folder / "logs").iterdir()}
    outputs = {str(job): cluster.output(job) for job in (trained.job, trained.joined)}
    assert [name for name, text in (logs | outputs).items() if "Traceback" in text] == []


def test_a_cancelled_job_ends_in_order_within_the_grace_time_and_leaves_no_process(
    cluster: SlurmCluster, trained: Trained, tmp_path: Path
) -> None:
    job = submit(cluster, "hybrid.slurm", tmp_path, "steps=100000", *FAKE, with_model(trained.folder / "model"))
    folder = tmp_path / "runs" / "tiny"
    metrics = folder / "metrics.jsonl"
    await_(cluster, job, lambda: True if metrics.exists() and metrics.read_text() else None, "trained step")
    cluster.cancel(job)
    # SLURM kills what is left after KILL_WAIT_S; a little more for it to notice
    assert cluster.wait(job, KILL_WAIT_S + 5) == "CANCELLED", cluster.output(job)
    assert processes_of(cluster, job) == []
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["mode"], summary["state"], summary["reason"]) == ("hybrid", "stopped", "asked to stop")
    assert summary["groups"]["trained"] > 0
    assert accounted(summary["groups"])


def test_a_job_whose_configuration_contradicts_its_mode_fails_at_once_and_says_why(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(cluster, "sync.slurm", tmp_path, "max_staleness=1")
    assert cluster.wait(job, START_SECONDS) == "FAILED"
    assert "ConfigError: mode = 'sync' takes turns, so max_staleness must be 0, not 1" in cluster.output(job)
    assert not (tmp_path / "runs").exists()


def test_a_rollout_job_without_an_address_fails_and_says_what_is_missing(cluster: SlurmCluster) -> None:
    job = cluster.sbatch(ROOT / "launch" / "rollout.slurm", env=ENVIRONMENT, options=HALF_A_NODE)
    assert cluster.wait(job, START_SECONDS) == "FAILED"
    assert "the address of a sample broker" in cluster.output(job)
