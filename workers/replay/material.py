"""What a replay works on: the recorded groups that a stage can be given, under the recorded configuration or another.

Everything the worker reads comes from here; nothing is written to what was recorded.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from brokers.record import TRAINER, StageSpec
from brokers.recording import Recorded, Recording, RunFacts, load
from common import config as configuration
from common.errors import ConfigError
from common.settings import Config, Model
from workers import registry, wiring
from workers.wiring import StageColumns

NEED_A_MODEL = frozenset({"rollout", "reference", "trainer"})
"""roles that load the model's folder"""


@dataclass(frozen=True, slots=True)
class Material:
    """`groups`: in the order of their prompts; for the trainer, of the steps that trained them.

    `skipped`: how many groups cannot be given to the stage, by reason. `order`: the pipeline's stages; `behind`: those
    that work on what this one adds.
    """

    role: str
    recording: Recording
    facts: RunFacts
    config: Config
    spec: StageSpec
    groups: Sequence[Recorded]
    order: Sequence[str]
    behind: frozenset[str]
    skipped: Counter[str] = field(default_factory=Counter[str])


def prepare(role: str, args: argparse.Namespace) -> Material:
    """Read `args.replay`; raises `ConfigError` for what cannot be replayed into this role, with what to do instead."""
    if role == "prompt":
        raise ConfigError(
            "--replay: the prompt worker has no queue, so there is nothing to hand to it; the prompts of a recording "
            "are what `python -m workers.rollout --replay DIR` works on"
        )
    recording = load(Path(args.replay))
    config = config_of(recording, role, args)
    stages = wiring.stages_of(config)
    stage = next((stage for stage in stages if stage.name == role), None)
    if stage is None:
        known = ", ".join(stage.name for stage in stages)
        raise ConfigError(f"--replay: this configuration has no stage {role!r}; it has {known}")
    spec, skipped = stage.spec(), Counter[str]()
    groups = [group for group in recording.groups.values() if _fits(group, spec, skipped)]
    skipped.update({"its beginning was dropped from the journal": len(recording.lost)} if recording.lost else {})
    unknown = sys.maxsize  # never trained: behind all others
    groups.sort(key=lambda group: (group.key.purpose != "train", group.key.seq))
    if role == TRAINER:
        groups.sort(key=lambda group: group.step if group.step >= 0 else unknown)
    if not groups:
        reasons = "; ".join(f"{count} groups: {reason}" for reason, count in skipped.items()) or "it holds none"
        raise ConfigError(f"--replay {args.replay}: no group that stage {role!r} could be given: {reasons}")
    facts = recording.facts or RunFacts("replay", config.model_dump(mode="json"), Path(args.replay))
    order = [stage.name for stage in stages]
    return Material(role, recording, facts, config, spec, groups[: args.limit], order, behind(stages, role), skipped)


def config_of(recording: Recording, role: str, args: argparse.Namespace) -> Config:
    """Return the configuration of `args.config`, by default the recorded one, changed by `args.set`.

    There is nobody to take turns with and nobody who asks held-out prompts, so the mode is async and no evaluation is
    waited for, whatever the run did. Raises `ConfigError` when a model is needed and not there.
    """
    facts = recording.facts
    own = str(facts.folder / "model") if facts is not None else None
    if args.config is not None:
        config = configuration.load(Path(args.config), args.set, registry.options)
    elif facts is not None:
        tree = dict(facts.config)
        if tree["model"].get("path") is None:
            tree["model"] = {"path": own}
        config = configuration.changed(tree, args.set, registry.options)
    else:
        raise ConfigError(f"{recording.folder}: no run.json or ../plan.json tells of its configuration: add --config")
    path = config.model.path or own
    if role in NEED_A_MODEL and (path is None or not (Path(path) / "config.json").exists()):
        raise ConfigError(f"--replay: no model in {path}: name a folder by --set model.path=FOLDER")
    alone = {"mode": "async", "evaluation": config.evaluation.model_copy(update={"prompts": 0})}
    return config.model_copy(update={**alone, "model": Model(path=path)})


def behind(stages: Sequence[StageColumns], role: str) -> frozenset[str]:
    """Return the stages that require what `role` adds, or what one of them adds."""
    found, made = {role}, {column for stage in stages if stage.name == role for column in stage.adds}
    while more := [stage for stage in stages if stage.name not in found and stage.requires & made]:
        found |= {stage.name for stage in more}
        made |= {column for stage in more for column in stage.adds}
    return frozenset(found - {role})


def _fits(group: Recorded, spec: StageSpec, skipped: Counter[str]) -> bool:
    """Whether the stage can be given this group; why not is counted."""
    if group.key.purpose not in spec.purposes:
        return False
    missing = spec.requires - group.sections(without=[spec.name]).keys()
    if missing:
        skipped[f"no section {', '.join(sorted(missing))}"] += 1
    return not missing
