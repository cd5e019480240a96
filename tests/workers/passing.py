"""A single group on its way through the stages, without a broker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from brokers.client import Leased
from common.group import Group, GroupKey
from common.section import Section, encode
from pipeline_parts import END, Encoder, Rows, config
from workers.algorithms.grpo import Grpo
from workers.reward.stage import RewardStage
from workers.rollout.engine import Completion, Generation
from workers.rollout.requests import request_of, result_of
from workers.trainer.backends.torch import TorchBackend
from workers.trainer.torch_backend import Training


def prompted(seq: int = 0, *, attempt: int = 1, tensors: Section | None = None, purpose: Any = "train") -> Leased:
    """A group that rollout has leased."""
    sections = {section.name: section for section in Encoder().encode(Rows(1).train[0], {}, 0)}
    if tensors is not None:
        sections["tensors"] = tensors
    return Leased(1, Group(GroupKey(f"{purpose}-{seq}", seq, purpose), attempt, sections))


def passed(leased: Leased, completion: Completion, **stages: Any) -> Group:
    """Let a generated group pass the given stages in their order."""
    request = request_of(leased, config(group_size=len(completion.samples)), (END,), ())
    group = leased.group
    for section in result_of(leased, request, completion, lambda ids: "ab" * bool(ids)).sections:
        group.sections[section.name] = section
    for stage in stages.values():
        (section,) = stage.handle([group])
        group.sections[section.name] = section
    return group


def step(folder: Path, groups: Sequence[Group], **algorithm: Any) -> tuple[torch.Tensor, Mapping[str, float]]:
    """Gradient of the mean loss over the tokens of one step, and its metrics."""
    training = Training(TorchBackend.Options(), folder, False)
    training.prepare_training(Grpo(Grpo.Options(**algorithm)), None)
    training.accumulate(groups)
    parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in training.model.parameters()]
    gradient = torch.cat([p.flatten() for p in parameters])
    metrics = training.update()
    return gradient / max(metrics["tokens"], 1), metrics


class Told:
    """A reward stage that says what it is told to."""

    requires, adds = RewardStage.requires, RewardStage.adds

    def __init__(self, rewards: Sequence[float], statuses: Sequence[str]) -> None:
        self._columns: dict[str, Sequence[Any]] = {"reward": list(rewards), "reward_status": list(statuses)}

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        return [encode("reward", self._columns) for _ in groups]


def sampled(*responses: Sequence[int], reason: Any = "stop", spans: Any = ((0, 0),)) -> Completion:
    samples = [Generation(tuple(ids), (-1.0,) * len(ids), spans, reason) for ids in responses]
    return Completion("g", samples)
