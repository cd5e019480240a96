"""Whole runs, side by side on this machine: async against sync, and both sides of GRPO against TRL.

    python tests/bench/e2e.py                       # all three parts, less than four minutes on two cores
    python tests/bench/e2e.py --only pipeline       # or text, trl

text      the text quickstart, shortened: samples a second in mode async at staleness 1, and in mode sync.
pipeline  a generator and a trainer of known times Tr and Tt that use no CPU: a pipeline without any loss is
          (Tr + Tt) / max(Tr, Tt) times as fast as taking turns.
trl       TRL's GRPOTrainer in a virtual environment of its own (`make peers`), with the same model, prompts, group
          size and tokens, at the better of one and two threads; see peers/trl_grpo.py for the settings.

Figures are of the steady state: the first steps of a run and its last ones, when nothing is left to generate, are left
out. Parts run one after the other, so nothing but their own processes shares the cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # a script finds only its own folder

from common import metrics  # noqa: E402
from tests.bench import table  # noqa: E402
from tests.bench.lengths import length_of  # noqa: E402

FIRST, LAST = 6, 2
"""steps at both ends of a run that are left out"""
PROMPTS, SAMPLES = 16, 16
TRL_STEPS = 14
SIDES = (("fixed", 16), ("long-tail", 16), ("long-tail", 64))


@dataclass(frozen=True, slots=True)
class Steady:
    """The middle of a run. `wait_s`: of a step, when the trainer had nothing to do."""

    step_s: float
    samples_per_s: float
    wait_s: float


def run(config: Path, folder: Path, *settings: str) -> Steady:
    """Run a configuration to its end in `folder`; raises `CalledProcessError`, with its log shown, if it fails."""
    told = json.dumps(str(folder))
    command = [sys.executable, "-m", "launch", "up", str(config)]
    for setting in (f"folder={told}", "evaluation.prompts=0", *settings):
        command += ["--set", setting]
    print(f"  {config.name} {' '.join(settings)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    done.check_returncode()
    name = tomllib.loads(config.read_text(encoding="utf-8"))["name"]
    return steady([row for row in metrics.read(folder / name / "metrics.jsonl") if row["kind"] == "step"])


def steady(rows: Sequence[dict[str, Any]]) -> Steady:
    """Return the figures of a run from the rows of its steps; a row is written at the end of its step."""
    kept = rows[FIRST : len(rows) - LAST]
    seconds = kept[-1]["time"] - rows[FIRST - 1]["time"]
    waited = sum(row["wait_s"] for row in kept)
    return Steady(seconds / len(kept), sum(row["samples"] for row in kept) / seconds, waited / len(kept))


def text_task(folder: Path) -> list[table.Row]:
    """Return the speed of the text quickstart in both modes."""
    config = ROOT / "configs" / "quickstart-text.toml"
    found = {mode: run(config, folder / mode, "steps=32", f"mode={mode}") for mode in ("async", "sync")}
    rows = [table.Row(f"text task, {mode}", found[mode].samples_per_s, "samples/s") for mode in found]
    ratio = found["async"].samples_per_s / found["sync"].samples_per_s
    return [*rows, table.Row("text task, async over sync", ratio, "times", "sync")]


def pipeline(folder: Path) -> list[table.Row]:
    """Return what async gains over sync where the times of both sides are known."""
    config = HERE / "pipeline.toml"
    told = tomllib.loads(config.read_text(encoding="utf-8"))
    engine, groups = told["engine"], told["groups_per_step"]
    generation_s = groups / engine["max_running_groups"] * engine["seconds_per_group"]
    training_s = groups * told["backend"]["seconds_per_group"]
    both_s, longer_s = generation_s + training_s, max(generation_s, training_s)
    turns, overlapped = (run(config, folder / mode, f"mode={mode}") for mode in ("sync", "async"))
    gain = turns.step_s / overlapped.step_s
    return [
        table.Row("pipeline, step in sync", turns.step_s, "s", f"Tr + Tt = {both_s:g} s"),
        table.Row("pipeline, step in async", overlapped.step_s, "s", f"max(Tr, Tt) = {longer_s:g} s"),
        table.Row("pipeline, trainer waits in async", overlapped.wait_s, "s a step"),
        table.Row("pipeline, async over sync", gain, "times", f"bound {both_s / longer_s:g}"),
        table.at_least("pipeline, share of the bound", gain * longer_s / both_s, "", "the pipeline bound", 0.95),
        table.Row("pipeline, share of a lossless step", longer_s / overlapped.step_s, "", "max(Tr, Tt) / step"),
    ]


def write_prompts(path: Path, lengths: str, cap: int) -> None:
    """Write the prompts of TRL's steps, once each; our rows also say how long each sample is."""
    lines: list[str] = []
    for i in range(TRL_STEPS * PROMPTS):
        x, y = i * 7 // 10 % 10, i * 7 % 10
        limits = [length_of(i, j, cap) if lengths == "long-tail" else cap for j in range(SAMPLES)]
        sampling = {"ignore_stop": True, "max_tokens": limits}
        lines.append(json.dumps({"prompt": f"{x}+{y}=", "answer": str((x + y) % 10), "sampling": sampling}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def trl(python: Path, folder: Path, model: Path, lengths: str, cap: int) -> float:
    """Return TRL's samples a second, at the better number of threads."""
    best = 0.0
    for threads in (1, 2):
        print(f"  TRL, {lengths}, {cap} tokens, {threads} threads", file=sys.stderr, flush=True)
        out = folder / f"trl-{threads}.json"
        sizes = {"steps": TRL_STEPS, "prompts-per-step": PROMPTS, "group-size": SAMPLES, "max-new-tokens": cap}
        names = {"model": model, "prompts": folder / "prompts.jsonl", "lengths": lengths, "threads": threads}
        options = [f"--{name}={value}" for name, value in {**sizes, **names, "json": out}.items()]
        # Threads that wait spinning take the cores from those that work.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [str(python), str(HERE / "peers" / "trl_grpo.py"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
        best = max(best, json.loads(out.read_text(encoding="utf-8"))["samples_per_s"])
    return best


def against_trl(python: Path, folder: Path) -> list[table.Row]:
    """Return both sides' samples a second for fixed and long-tailed lengths."""
    from workers.models.tiny import write_tiny_text  # noqa: PLC0415 - torch, only for this part

    model = folder / "model"
    write_tiny_text(model, characters="0123456789+=")
    rows: list[table.Row] = []
    for lengths, cap in SIDES:
        mine = folder / f"{lengths}-{cap}"
        mine.mkdir(parents=True)
        write_prompts(mine / "prompts.jsonl", lengths, cap)
        paths = {"model.path": model, "data.path": mine / "prompts.jsonl"}
        settings = [f"{name}={json.dumps(str(path))}" for name, path in paths.items()]
        ours = run(HERE / "lengths.toml", mine, *settings).samples_per_s
        theirs = trl(python, mine, model, lengths, cap)
        name = f"{lengths} lengths, {cap} tokens"
        rows += [
            table.Row(f"{name}, here", ours, "samples/s"),
            table.Row(f"{name}, TRL", theirs, "samples/s"),
            # Equal lengths leave no bubble to remove: what is gained there is the second core, and nothing is promised.
            table.at_least(f"{name}, here over TRL", ours / theirs, "times", "TRL GRPOTrainer", 2.0)
            if lengths == "long-tail"
            else table.Row(f"{name}, here over TRL", ours / theirs, "times", "TRL GRPOTrainer"),
        ]
    return rows


def main() -> None:
    """Run the parts that were asked for."""
    parser = table.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=("text", "pipeline", "trl"), default=("text", "pipeline", "trl"))
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python", metavar="PYTHON")
    args = parser.parse_args()
    if "trl" in args.only and not args.peers.exists():
        parser.error(f"--peers {args.peers} is not there: `make peers` makes it, `--only text pipeline` needs none")
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory(prefix="relaxq-bench-") as home:
        if "text" in args.only:
            rows += text_task(Path(home) / "text")
        if "pipeline" in args.only:
            rows += pipeline(Path(home) / "pipeline")
        if "trl" in args.only:
            rows += against_trl(args.peers, Path(home) / "trl")
    table.report(rows, args.json)


if __name__ == "__main__":
    main()
