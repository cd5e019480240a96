"""What a run came to: a few numbers from its metrics and the broker's last words, as JSON, as a curve and as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import metrics
from common.process import write_atomically
from common.settings import Config

METRICS, SUMMARY, PLOT, BOARD, CHECKPOINT = "metrics.jsonl", "summary.json", "reward.png", "tensorboard", "checkpoint"
"""names in a run's folder"""
LAST_STEPS = 10
"""steps that `reward_last` and the running mean of the plot average over"""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that count; none if it wrote none.

    A trainer that came back from an earlier version makes its steps again: the rows of the abandoned ones are left out.
    """
    path = folder / METRICS
    kept: list[dict[str, Any]] = []
    for row in metrics.read(path) if path.exists() else ():
        if row["kind"] == "step":
            kept = [old for old in kept if old["version"] < row["version"]]
        elif row["kind"] == "evaluation":
            kept = [old for old in kept if old["kind"] != "evaluation" or old["version"] != row["version"]]
        kept.append(row)
    return kept


def summarise(folder: Path, config: Config, status: Mapping[str, Any], wall_s: float, state: str) -> dict[str, Any]:
    """Return what is worth knowing of a run that has ended; None where there is no number.

    `reward_last` is the mean of the last 10 steps, `samples_per_s` counts from the beginning of the first step to the
    end of the last one, `staleness_max` is in updates, `groups` are those of training.
    """
    rows = rows_of(folder)
    steps = [row for row in rows if row["kind"] == "step"]
    rewards = _numbers(steps, "reward")
    heldout = _numbers(sorted(_evaluations(rows), key=lambda row: row["version"]), "heldout")
    counts: Mapping[str, Any] = status.get("counts", {})
    return {
        "name": config.name,
        "run": status.get("run"),
        "mode": config.mode,
        "seed": config.seed,
        "state": state,
        "reason": status.get("reason", ""),
        "steps": steps[-1]["step"] if steps else 0,
        "wall_s": wall_s,
        "samples_per_s": _speed(steps),
        "reward_first": steps[0].get("reward") if steps else None,
        "reward_last": _mean(rewards[-LAST_STEPS:]),
        "heldout_first": heldout[0] if heldout else None,
        "heldout_last": heldout[-1] if heldout else None,
        "staleness_max": max(_numbers(steps, "staleness_max"), default=None),
        "max_staleness": config.max_staleness,
        "groups": {
            "started": counts.get("started", 0),
            "trained": counts.get("trained", 0),
            "dropped": sum(counts.get("dropped", {}).values()),
            "dead": sum(counts.get("dead", {}).values()),
        },
        "folder": str(folder),
    }


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` whole or not at all."""
    write_atomically(folder / SUMMARY, summary)


def plot(folder: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Draw `reward.png` from the rows of a run; False if there is nothing to draw or matplotlib is not installed."""
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in _evaluations(rows) if row.get("heldout") is not None]
    if not steps and not evaluations:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional: relaxq[plots]
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    above.set_title(folder.name)
    scored = [row for row in steps if row.get("reward") is not None]
    rewards, at = [row["reward"] for row in scored], [row["version"] for row in scored]
    above.plot(at, rewards, color="tab:blue", linewidth=0.8, alpha=0.5, label="reward, each step")
    above.plot(at, running_mean(rewards), color="tab:blue", linewidth=2.0, label=f"reward, mean of {LAST_STEPS} steps")
    if evaluations:
        solved = [row["heldout"] for row in evaluations]
        above.plot([row["version"] for row in evaluations], solved, "o--", color="tab:orange", label="held-out, solved")
    above.set_ylabel("reward; share solved")
    above.grid(alpha=0.3)
    above.legend(loc="best", frameon=False)
    aged = [row for row in steps if row.get("staleness_max") is not None]
    at = [row["version"] for row in aged]
    below.step(at, [row["staleness_max"] for row in aged], where="mid", color="tab:red", label="max")
    below.plot(at, [row["staleness_mean"] for row in aged], color="tab:gray", label="mean")
    oldest = max((row["staleness_max"] for row in aged), default=0.0)
    below.set_ylim(-0.2, 1.6 * max(1.0, oldest))  # room for the legend above the lines
    below.set_ylabel("staleness\n(updates)")
    below.set_xlabel("policy version, updates")
    below.grid(alpha=0.3)
    below.legend(loc="upper right", frameon=False, ncols=2)
    FigureCanvasAgg(figure).print_png(str(folder / PLOT))
    return True


def text(summary: Mapping[str, Any]) -> str:
    """Return the closing lines of a run; of the files, those that are there."""
    minutes, seconds = divmod(round(summary["wall_s"]), 60)
    folder, groups = Path(summary["folder"]), summary["groups"]
    reason = f" ({summary['reason']})" if summary["reason"] and summary["state"] != "finished" else ""
    lines = [
        f"{summary['name']} {summary['state']}{reason}: {summary['steps']} steps in {minutes} min {seconds} s",
        "",
        f"  reward     {_shown(summary['reward_first'])} at first, {_shown(summary['reward_last'])} over the last",
        f"  held-out   {_shown(summary['heldout_first'])} at first, {_shown(summary['heldout_last'])} at last",
        f"  speed      {_shown(summary['samples_per_s'], 1)} samples/s, mode {summary['mode']}, seed {summary['seed']}",
        f"  staleness  {_shown(summary['staleness_max'], 0)} of at most {summary['max_staleness']}",
        "  groups     " + ", ".join(f"{count} {name}" for name, count in groups.items()),
    ]
    places = {
        "checkpoint": folder / CHECKPOINT,
        "metrics": folder / METRICS,
        "plot": folder / PLOT,
        "summary": folder / SUMMARY,
        "logs": folder / "logs",
    }
    found = [f"  {name:<10} {path}" for name, path in places.items() if path.exists()]
    if (folder / BOARD).exists():
        found.append(f"  curves     tensorboard --logdir {folder / BOARD}")
    return "\n".join([*lines, *([""] if found else []), *found])


def running_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of it and up to 9 before it."""
    windows = (values[max(0, end - LAST_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == "evaluation"]


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _speed(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """A step's row is written at its end, so the first one's duration is added to the time between the rows."""
    if not steps:
        return None
    seconds = steps[-1]["time"] - steps[0]["time"] + steps[0]["step_s"]
    return sum(row["samples"] for row in steps) / seconds if seconds > 0 else None


def _shown(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
