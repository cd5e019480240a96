"""The settings of a run, as one frozen tree of tables. `common.config` reads, checks and writes it.

A component (engine, backend, reward, algorithm, data source, model recipe) keeps its options next to its code; the
tables here only hold its name.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Table(BaseModel):
    """A group of settings. Unknown settings are errors, numbers are finite, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Component(BaseModel):
    """Names one implementation; everything beside `name` is its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The settings beside the name."""
        return dict(self.model_extra or {})


class Model(Table):
    """Where the initial weights come from: a Hugging Face folder, or a recipe that makes one."""

    path: str | None = None
    recipe: Component | None = None


class Sampling(Table):
    """How responses are drawn. `max_tokens`: longest response."""

    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(256, gt=0)


class Evaluation(Table):
    """Held-out prompts, answered once each at the first and last version and every `every` updates.

    `temperature` 0 is greedy. An answer counts as solved when its reward is at least `solved_at`.
    """

    prompts: int = Field(128, ge=0)
    solved_at: float = 1.0
    every: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0)
    deadline_seconds: float = Field(300.0, gt=0)


class Rewards(Table):
    """Limits of the reward stage. `processes` score samples side by side; one sample may take `timeout_seconds`."""

    processes: int = Field(1, gt=0)
    timeout_seconds: float = Field(10.0, ge=0)


class Workers(Table):
    """How many processes each role gets. In hybrid mode reference and advantage run inside the trainer.

    `rollout`: on each node that generates, which are all but the first of a run on several nodes.
    """

    rollout: int = Field(1, ge=0)
    reward: int = Field(1, ge=0)
    reference: int = Field(1, ge=0)
    advantage: int = Field(1, ge=0)


class Staleness(Table):
    """What becomes of a group that keeps the trainer from its next batch for `straggler_seconds`.

    `wait`: the trainer waits on. `drop`: the group is given up. `regenerate`: it is generated anew by current weights,
    at most `broker.max_attempts` times. `down_weight`: the trainer goes on, and the group is trained when it comes; its
    loss is multiplied by `factor` for each version by which it is older than `max_staleness`.
    """

    policy: Literal["wait", "drop", "regenerate", "down_weight"] = "wait"
    straggler_seconds: float = Field(60.0, gt=0)
    factor: float = Field(0.5, gt=0, lt=1)


class Broker(Table):
    """The sample broker. `max_queue_groups`: prompts waiting for rollout, by default twice what may be under way.

    `order`: in which groups leave the queues before the trainer's: as they came, by the version of their start, or by
    tokens (before rollout: predicted ones); who waits for more than `fairness_seconds` leaves first. `lanes`: upper
    bounds of predicted lengths in tokens; a rollout worker may ask for groups of one lane first.

    `memory_bytes`: sections beyond these go to files in the run's folder. `max_bytes`: sections in memory and files
    together, above which prompts wait; by default only the rollout queue's own bounds hold them up.
    `journal`: survive the broker's death, by files in the run's folder; `journal_fsync`: a power cut, too;
    `journal_keep`: delete none of these files, so that they tell of the whole run.
    """

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    encrypt: Literal["auto", True, False] = "auto"  # auto: if other machines can reach `host`
    lease_seconds: float = Field(30.0, gt=0)
    heartbeat_seconds: float = Field(1.0, gt=0)
    request_seconds: float = Field(60.0, gt=0)
    max_attempts: int = Field(3, gt=0)
    max_queue_groups: int | None = None
    max_queue_bytes: int = 4 << 30
    memory_bytes: int = 8 << 30
    max_bytes: int | None = None
    high_water_mark: int = 64
    order: Literal["fifo", "oldest_version", "short_first"] = "oldest_version"
    fairness_seconds: float = Field(300.0, gt=0)
    lanes: tuple[int, ...] = ()
    journal: bool = False
    journal_segment_bytes: int = Field(256 << 20, gt=0)
    journal_fsync: bool = False
    journal_keep: bool = False

    @field_validator("max_queue_groups", "max_queue_bytes", "memory_bytes", "max_bytes", "high_water_mark")
    @classmethod
    def _is_a_bound(cls, value: int | None) -> int | None:
        if value is not None and value <= 0:
            raise ValueError("a bound must be at least 1; in ZeroMQ 0 would mean unlimited, and memory has an end")
        return value

    @field_validator("lanes")
    @classmethod
    def _are_ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted({bound for bound in value if bound > 0}):
            raise ValueError("upper bounds of lanes are positive and ascending, for example [256, 1024]")
        return value


class Weights(Table):
    """The weight plane. `in_flight`: what becomes of running generations when a version arrives."""

    in_flight: Literal["finish", "continue"] = "continue"
    chunk_bytes: int = Field(4 << 20, gt=0)
    keep_versions: int = Field(2, gt=0)


class Watchdog(Table):
    """What is done about a worker that lives and does not get on, or a stage that nobody serves, after `seconds`.

    `warn`: say so, in the log, in the status and on the panel. `expire`: also take the worker's groups and its turn
    away; what it still hands in of them is refused. `end`: end the run as failed, exit code 5.
    """

    seconds: float = Field(300.0, gt=0)
    action: Literal["warn", "expire", "end"] = "warn"


class Supervisor(Table):
    """How processes are kept alive. After `max_restarts` of one process the run ends as failed."""

    max_restarts: int = Field(5, ge=0)
    grace_seconds: float = Field(10.0, gt=0)
    start_seconds: float = Field(60.0, gt=0)


class Config(Table):
    """Everything about one run.

    `micro_steps`: pieces in which the trainer takes a step's groups as they arrive; 1 waits for the closed batch.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: str = "runs"
    mode: Literal["sync", "async", "hybrid"] = "async"
    seed: int = 0
    steps: int | None = Field(None, gt=0)
    epochs: int | None = Field(None, gt=0)
    deterministic: bool = False
    max_staleness: int = Field(1, ge=0)
    groups_per_step: int = Field(gt=0)
    group_size: int = Field(gt=0)
    micro_steps: int = Field(4, gt=0)
    model: Model
    data: Component
    sampling: Sampling = Sampling.model_validate({})
    evaluation: Evaluation = Evaluation.model_validate({})
    engine: Component = Component(name="torch")
    reward: Component = Component(name="exact")
    rewards: Rewards = Rewards.model_validate({})
    algorithm: Component = Component(name="grpo")
    backend: Component = Component(name="torch")
    workers: Workers = Workers.model_validate({})
    staleness: Staleness = Staleness.model_validate({})
    broker: Broker = Broker.model_validate({})
    weights: Weights = Weights.model_validate({})
    watchdog: Watchdog = Watchdog.model_validate({})
    supervisor: Supervisor = Supervisor.model_validate({})

    @property
    def run_folder(self) -> Path:
        """Folder of this run's logs, results and checkpoint."""
        return Path(self.folder) / self.name
