"""A status as the sample broker describes it in the middle of a run, for tests that show or summarise it."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from common.config import check
from common.settings import Config


class AnyOptions(BaseModel):
    model_config = ConfigDict(extra="allow")


def config(**settings: Any) -> Config:
    tree = {"name": "mod10", "groups_per_step": 8, "group_size": 4, "steps": 60, **settings}
    return check({"model": {"path": "m"}, "data": {"name": "mod10"}, **tree}, lambda _kind, _name: AnyOptions)


def worker(name: str, role: str, **facts: Any) -> dict[str, Any]:
    member = {"name": name, "role": role, "host": "node-a", "pid": 4711, "version": -1, "seen_s": 0.4, "lost": ""}
    return {**member, "progress": {}, **facts}


def queue(groups: int, ready: int, num_bytes: int, oldest_s: float, idle: int) -> dict[str, Any]:
    return {
        "groups": groups,
        "ready": ready,
        "bytes": num_bytes,
        "oldest_s": oldest_s,
        "waiting_workers": idle,
    }


def trainer(**progress: Any) -> dict[str, Any]:
    told = {
        "step": 12,
        "reward": 0.4312,
        "staleness_max": 1.0,
        "samples_per_s": 123.44,
        "step_s": 0.519,
        "wait_s": 0.112,
        "steps": 60,
        "heldout": 0.25,
        "heldout_version": 10,
        **progress,
    }
    return worker("trainer-0", "trainer", version=12, progress=told)


def status(*workers: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Return the status at step 12 of 60: 8 groups a step, 12 x 8 = 96 trained."""
    known = workers or (
        worker("weights", "weights"),
        worker("prompt-0", "prompt"),
        trainer(),
        worker("rollout-0", "rollout", version=12, progress={"policy_version": 12, "tokens": 48210, "running": 6}),
        worker("reward-0", "reward", progress={"groups": 110}),
        worker("reference-0", "reference", progress={"groups": 109}),
        worker("advantage-0", "advantage", progress={"groups": 104}),
    )
    counts = {
        "started": 115,
        "trained": 96,
        "evaluated": 256,
        "evaluation_lost": 0,
        "dropped": {"stale": 3},
        "dead": {"reward failed": 1},
        "restarted": 0,
        "regenerated": 0,
        "down_weighted": 0,
        "expired": 2,
        "repeated": 0,
        "refused": {},
        "unroutable": 0,
        "turned_away": 0,
    }
    queues = {
        "rollout": queue(8, 2, 21_000, 0.31, 0),
        "reward": queue(1, 0, 9_000, 0.02, 0),
        "reference": queue(2, 1, 420_000, 0.12, 0),
        "advantage": queue(0, 0, 0, 0.0, 1),
        "trainer": queue(5, 5, 3_500_000, 1.74, 0),
        "evaluate": queue(0, 0, 0, 0.0, 0),
    }
    return {
        "state": "running",
        "reason": "",
        "version": 12,
        "endpoints": {"weights": "tcp://127.0.0.1:40001"},
        "evaluation": [10, 128],
        "next_seq": {"train": 640, "eval": 128},
        "run": "mod10-3fa2c9d1",
        "outstanding": 15,
        "late": 0,
        "bytes": 3_950_000,
        "store": {"memory_bytes": 3_950_000, "mapped_bytes": 0},
        "waiting_producers": [],
        "full": "",
        "queues": queues,
        "counts": counts,
        "dead_letters": [],
        "workers": list(known),
        "stuck": [],
        "turn": {"side": "", "fence": 0},
        "taps": [],
        **facts,
    }
