"""The training behind backend `torch`: rows in micro-batches, gradients of sums, one AdamW step per update.

Shapes: S samples of the groups, R rows of a micro-batch, T longest response.

What a step learns must not depend on how its rows were split, so gradients are those of the SUM of token losses, and
the division by the number of tokens waits for `update`, when all of the step is known.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, Reject
from common.group import Group
from common.tensor import NamedTensor
from workers.models.batch import Array, Ragged, Rows, ragged_like_tokens, read_rows
from workers.models.forward import Scorer
from workers.models.load import load_model, to_named
from workers.trainer.algorithm import Algorithm, TokenBatch
from workers.trainer.backend import loss_weights
from workers.trainer.backends.torch import TorchBackend
from workers.trainer.micro import plan

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


@dataclass(frozen=True, slots=True)
class Targets:
    """What the loss compares the model with, row by row like `Rows`.

    `counts`: bool, tokens that are in sums and means; `trained_S`: indices of the rows that have one.
    """

    behaviour: Ragged
    advantages: Ragged
    reference: Ragged | None
    counts: Ragged
    weight_S: Array
    trained_S: Array


class Training:
    """A model, its optimizer, and the step that is being accumulated: until `update`, gradients are those of sums."""

    def __init__(self, options: TorchBackend.Options, folder: Path, deterministic: bool) -> None:
        if deterministic:
            # On CUDA, cuBLAS also wants CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts; torch says so.
            torch.use_deterministic_algorithms(True)
        self._options, self._folder = options, folder
        self._device = _device(options.device)
        # Evaluation mode, as loaded: dropout would make the ratio to the engine's log-probs differ from 1.
        self.model = load_model(folder, dtype=options.dtype, device=options.device)
        self._scorer = Scorer(self.model)
        self._algorithm: Algorithm | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._total_steps: int | None = None
        self._updates = 0
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    def prepare_training(self, algorithm: Algorithm, total_steps: int | None) -> None:
        """Raise `ConfigError` when the schedule ends with the run and the run has no end."""
        if self._options.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"setting 'backend.schedule' = {self._options.schedule!r} needs 'steps'; set it, or write 'constant'"
            )
        self._algorithm, self._total_steps = algorithm, total_steps
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._options.lr,
            betas=self._options.betas,
            weight_decay=self._options.weight_decay,
            fused=True,
        )

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Check all groups, then add to gradients and sums, micro-batch by micro-batch."""
        algorithm = self._algorithm
        assert algorithm is not None, "prepare_training comes first"
        if not groups:
            return
        rows = read_rows(groups, self._scorer.rules)
        targets = read_targets(groups, "ref_logprobs" in algorithm.loss_requires)
        trained = targets.trained_S
        for batch in plan(rows.length_S[trained], rows.kind_S[trained], self._options.max_tokens_per_micro):
            self._accumulate_micro(algorithm, rows, targets, trained[batch])
        self._tokens += int(targets.counts.flat.sum())

    def update(self) -> Mapping[str, float]:
        """Step by the gradient of the mean over all tokens accumulated; no token or no finite gradient: `skipped`."""
        assert self._optimizer is not None, "prepare_training comes first"
        lr = learning_rate(self._options, self._updates, self._total_steps)
        tokens = max(self._tokens, 1)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(tokens)
        norm = float(torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=False)) if gradients else 0.0
        # One infinite gradient would make every weight NaN for good; the step is left out and says so.
        usable = self._tokens > 0 and math.isfinite(norm)
        if usable:
            if norm > self._options.grad_clip:
                for gradient in gradients:
                    gradient.mul_(self._options.grad_clip / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        metrics = {"loss": 0.0, "entropy": 0.0, "mismatch": 0.0}
        metrics |= {name: float(total) / tokens for name, total in self._sums.items()}
        metrics |= {"grad_norm": norm, "lr": lr, "tokens": float(self._tokens), "skipped": float(not usable)}
        self._optimizer.zero_grad(set_to_none=True)
        self._updates, self._tokens, self._sums = self._updates + 1, 0, {}
        return metrics

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Group]) -> list[list[np.ndarray[Any, Any]]]:
        """Score without gradient; an empty response has an empty array."""
        if not groups:
            return []
        rows = read_rows(groups, self._scorer.rules)
        length_S = rows.responses.length
        each: list[Array] = [np.zeros(0, np.float32)] * len(length_S)
        wanted = np.flatnonzero(length_S)
        for batch in plan(rows.length_S[wanted], rows.kind_S[wanted], self._options.max_tokens_per_micro):
            chosen = wanted[batch]
            logprob_RT, _ = self._scorer.score(rows, chosen)
            for i, values in zip(chosen, logprob_RT.cpu().numpy(), strict=True):
                each[i] = values[: length_S[i]]
        bounds = np.searchsorted(rows.group_S, np.arange(len(groups) + 1))
        return [each[bounds[g] : bounds[g + 1]] for g in range(len(groups))]

    def weights(self) -> Iterator[NamedTensor]:
        """Return the weights under the names of `model.state_dict()` without the repeats of tied weights."""
        serve = self._options.serve_dtype
        snapshot = {
            name: value.detach().to(
                "cpu", getattr(torch, serve) if serve and value.is_floating_point() else value.dtype, copy=True
            )
            for name, value in untied(self.model).items()
        }
        return (to_named(name, value) for name, value in snapshot.items())

    def save(self, folder: Path) -> None:
        """Write the weights in the dtype they are trained in; whatever is no weight comes from the first folder."""
        shutil.copytree(self._folder, folder, ignore=shutil.ignore_patterns(*_WEIGHT_FILES), dirs_exist_ok=True)
        self.model.save_pretrained(folder)

    def offload(self) -> None:
        """Keep gradients of a step that is under way; they move like the weights."""
        if not self._tokens:
            self.model.zero_grad(set_to_none=True)
        if self._device.type != "cpu":
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Bring weights, gradients and optimizer state back to the device."""
        if self._device.type != "cpu":
            self._move(self._device)

    def _accumulate_micro(self, algorithm: Algorithm, rows: Rows, targets: Targets, chosen: Array) -> None:
        current_RT, entropy_RT = self._scorer.score(rows, chosen)
        width = current_RT.shape[1]

        def padded(values: Ragged) -> Tensor:
            return torch.from_numpy(values.padded(chosen, width, 0)).to(self._device)

        mask_RT, behaviour_RT = padded(targets.counts), padded(targets.behaviour)
        result = algorithm.loss(
            TokenBatch(
                current_RT=current_RT,
                entropy_RT=entropy_RT,
                behaviour_RT=behaviour_RT,
                advantage_RT=padded(targets.advantages),
                mask_RT=mask_RT,
                reference_RT=None if targets.reference is None else padded(targets.reference),
            )
        )
        weight_R = torch.from_numpy(targets.weight_S[chosen]).to(self._device)
        loss_RT = torch.where(mask_RT, result.loss_RT * weight_R[:, None], 0.0)
        loss_RT.sum().backward()
        mismatch_RT = (current_RT.detach() - behaviour_RT).abs()
        for name, values_RT in {
            "loss": loss_RT.detach(),
            "entropy": entropy_RT.detach(),
            "mismatch": mismatch_RT,
            **result.metrics,
        }.items():
            # float64 where the sums of a whole step meet: millions of float32 terms would lose the small ones.
            total = torch.where(mask_RT, values_RT, 0.0).sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _move(self, device: torch.device) -> None:
        self.model.to(device)  # pyright: ignore[reportArgumentType] - transformers declares its own signature
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update({name: value.to(device) for name, value in state.items()})


def read_targets(groups: Sequence[Group], with_reference: bool) -> Targets:
    """Read the columns of the loss.

    A token counts when its sample has weight and its behaviour log-prob is finite. Raises `Reject`, naming group and
    sample, for columns of unequal length, a weight that is negative or not finite, and advantages or reference
    log-probs that are not finite where they count.
    """
    behaviour, advantages = ragged_like_tokens(groups, "logprobs"), ragged_like_tokens(groups, "advantages")
    reference = ragged_like_tokens(groups, "ref_logprobs") if with_reference else None
    weights = [loss_weights(group) for group in groups]
    for group, weight in zip(groups, weights, strict=True):
        if len(weight) != len(group.column("response_ids")):
            raise Reject(
                f"group {group.key.id}: {len(weight)} loss weights for {len(group.column('response_ids'))} samples"
            )
    weight_S = np.concatenate(weights)
    _reject_where(groups, ~np.isfinite(weight_S) | (weight_S < 0), "loss_weight is negative or not finite")
    row = np.repeat(np.arange(len(weight_S)), behaviour.length)
    counts = np.isfinite(behaviour.flat) & (weight_S[row] > 0)
    for name, column in (("advantages", advantages), ("ref_logprobs", reference)):
        if column is not None:
            broken = np.zeros(len(weight_S), bool)
            broken[row[counts & ~np.isfinite(column.flat)]] = True
            _reject_where(groups, broken, f"{name} are not finite")
    trained_S = np.flatnonzero(np.bincount(row[counts], minlength=len(weight_S)))
    return Targets(
        behaviour, advantages, reference, Ragged(counts, behaviour.start, behaviour.length), weight_S, trained_S
    )


def learning_rate(options: TorchBackend.Options, updates: int, total_steps: int | None) -> float:
    """Return the learning rate of the update that follows `updates` earlier ones: a function of numbers alone.

    Warm-up: lr (updates + 1) / warmup_steps. Afterwards with x = the share of the remaining steps that lies behind:
    lr, lr (1 - x) or lr (1 + cos(pi x)) / 2.
    """
    if updates < options.warmup_steps:
        return options.lr * (updates + 1) / options.warmup_steps
    if options.schedule == "constant" or total_steps is None:
        return options.lr
    x = min((updates - options.warmup_steps) / max(total_steps - options.warmup_steps, 1), 1.0)
    return options.lr * (1 - x if options.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2)


def untied(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state of a model under its own names; of tied weights, the first name alone."""
    first: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if first.setdefault(id(value), name) == name}


def _reject_where(groups: Sequence[Group], broken_S: Array, flaw: str) -> None:
    wrong = np.flatnonzero(broken_S)
    if wrong.size:
        before = np.cumsum([0, *(len(group.column("response_ids")) for group in groups)])
        g = int(np.searchsorted(before, wrong[0], side="right")) - 1
        raise Reject(f"group {groups[g].key.id}, sample {wrong[0] - before[g]}: {flaw}")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"setting 'backend.device' = {name!r} is no device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"setting 'backend.device' = {name!r}: no CUDA device here; write 'cpu'")
    return device
