"""One new file each, outside this repository: a data source, an engine, a reward, an algorithm, a backend and a stage.

They are named in the configuration as `package.module:Class` and make a policy better; nothing else is touched.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from brokers.__main__ import limits_of
from brokers.channel import MemoryBroker
from brokers.client import SampleClient
from brokers.conduct import Facts
from brokers.samples import SampleService
from brokers.weight_client import Follower, WeightClient
from brokers.weights import WeightService
from common.clock import SystemClock
from common.config import load, to_json
from common.errors import ConfigError
from common.group import concatenate
from common.process import Stop
from common.section import Section, encode
from common.settings import Config
from launch import plan
from workers import registry, stage, wiring
from workers.advantage.stage import AdvantageStage
from workers.prompt.feed import Feed
from workers.prompt.source import Row
from workers.reward.stage import RewardStage
from workers.rollout.loop import Rollout
from workers.trainer.loop import Trainer

pytestmark = pytest.mark.unit

FILES = {
    "coins.py": '''
        """A data source: every prompt asks for heads."""
        from common.settings import Table
        from workers.prompt.source import Row

        class Coins:
            class Options(Table):
                size: int = 1000

            def __init__(self, options, seed):
                self.train = [Row(f"coin/{i}", ({"role": "user", "content": "?"},), "1") for i in range(options.size)]
                self.heldout = self.train[:20]
    ''',
    "tosser.py": '''
        """An engine: one token a sample, 1 with the probability that the weights say, else 0."""
        import math
        import random
        from common.settings import Table
        from common.errors import WireError
        from workers.rollout.engine import Completion, Generation

        class Tosser:
            requires = frozenset({"prompt_ids"})

            class Options(Table):
                room: int = 8

            def __init__(self, options, folder, deterministic):
                self.version, self._room, self._logit, self._requests = 0, options.room, -1.5, {}
                self.generated = 0

            def room(self):
                return self._room - len(self._requests)

            def running(self):
                return tuple(self._requests)

            def submit(self, request):
                self._requests[request.group] = request

            def step(self, wait_seconds):
                return [self._tossed(self._requests.pop(name)) for name in list(self._requests)]

            def _tossed(self, request):
                heads, samples = 1 / (1 + math.exp(-self._logit)), []
                for seed in request.seeds:
                    token = int(random.Random(seed).random() < heads)
                    logprob = math.log(heads if token else 1 - heads)
                    self.generated += 1
                    samples.append(Generation((token,), (logprob,), ((0, self.version),), "stop"))
                return Completion(request.group, samples)

            def abort(self, groups):
                return [self._tossed(self._requests.pop(name)) for name in list(groups) if name in self._requests]

            def load(self, version, tensors):
                (logit,) = tensors
                if logit.name != "logit":
                    raise WireError(f"weights: the engine has no tensor {logit.name!r}")
                self.version, self._logit = version, float(logit.numpy()[0])

            def interrupt(self): ...
            def sleep(self): ...
            def wake(self): ...
            def close(self): ...
    ''',
    "heads.py": '''
        """A reward: whether it is the label."""
        from common.settings import Table

        class Heads:
            class Options(Table):
                worth: float = 1.0

            def __init__(self, options):
                self._worth = options.worth

            def score(self, response):
                return self._worth * (response.text == response.label)
    ''',
    "plain.py": '''
        """An algorithm: REINFORCE with the group's mean as baseline, pulled to the reference."""
        import numpy as np
        from common.settings import Table
        from common.group import concatenate
        from common.section import encode
        from workers.trainer.algorithm import TokenLoss

        class Plain:
            scope = "group"
            advantage_requires = frozenset({"reward", "num_tokens"})
            loss_requires = frozenset({"ref_logprobs"})

            class Options(Table):
                pull: float = 0.01

            def __init__(self, options):
                self._pull = options.pull

            def advantage(self, groups):
                sections = []
                for group in groups:
                    rewards, lengths = group.numpy("reward"), group.numpy("num_tokens")
                    rows = [np.full(n, r - rewards.mean()) for n, r in zip(lengths, rewards)]
                    columns = {"advantages": concatenate(rows, "float32"), "loss_weight": [1.0] * len(rewards)}
                    sections.append(encode("advantage", columns))
                return sections

            def loss(self, batch):
                gap = batch.current_RT - batch.reference_RT
                return TokenLoss(-batch.advantage_RT * batch.current_RT + self._pull * gap**2, {})
    ''',
    "scalar.py": '''
        """A backend: one number, the log-odds of heads, and the gradient of the algorithm's own loss by differences."""
        import numpy as np
        from common.settings import Table
        from common.tensor import from_numpy
        from workers.trainer.algorithm import TokenBatch

        class Scalar:
            requires = frozenset({"response_ids", "logprobs", "advantages", "loss_weight"})

            class Options(Table):
                lr: float = 4.0

            def __init__(self, options, folder, deterministic):
                self._logit, self._lr, self._gradient, self._tokens = -1.5, options.lr, 0.0, 0

            def prepare_training(self, algorithm, total_steps):
                self._algorithm = algorithm

            def _logprobs(self, logit, ids):
                return np.where(ids == 1, -np.log1p(np.exp(-logit)), -np.log1p(np.exp(logit)))

            def _loss(self, logit, group):
                ids, behaviour, advantage, reference = (
                    np.stack(group.arrays(name)) for name in ("response_ids", "logprobs", "advantages", "ref_logprobs")
                )
                current = self._logprobs(logit, ids)
                batch = TokenBatch(current, 0 * current, behaviour, advantage, current < 1, reference)
                return float(self._algorithm.loss(batch).loss_RT.sum()), ids.size

            def accumulate(self, groups):
                for group in groups:
                    up, tokens = self._loss(self._logit + 1e-4, group)
                    down, _ = self._loss(self._logit - 1e-4, group)
                    self._gradient += (up - down) / 2e-4
                    self._tokens += tokens

            def update(self):
                self._logit -= self._lr * self._gradient / self._tokens
                self._gradient, self._tokens = 0.0, 0
                return {"loss": 0.0}

            def weights(self):
                return iter([from_numpy("logit", np.array([self._logit], np.float32))])
    ''',
    "even.py": '''
        """A stage: a reference without a model. It takes a coin to be even."""
        import math
        from common.group import concatenate
        from common.section import encode

        class Even:
            requires = frozenset({"response_ids"})
            adds = frozenset({"ref_logprobs"})

            def handle(self, groups):
                rows = [[[math.log(0.5)] * len(ids) for ids in group.arrays("response_ids")] for group in groups]
                return [encode("reference", {"ref_logprobs": concatenate(each, "float32")}) for each in rows]
    ''',
}

CONFIG = """
name = "coin"
steps = 25
groups_per_step = 4
group_size = 8
model.path = "none"
data.name = "extension.coins:Coins"
engine = { name = "extension.tosser:Tosser", room = 6 }
reward.name = "extension.heads:Heads"
algorithm = { name = "extension.plain:Plain", pull = 0.001 }
backend.name = "extension.scalar:Scalar"
evaluation.prompts = 20
"""


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package outside this repository; returns the configuration that names its classes."""
    package = tmp_path / "extension"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        (package / name).write_text(dedent(text))
    (tmp_path / "coin.toml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "coin.toml"
    for name in [name for name in sys.modules if name.partition(".")[0] == "extension"]:
        del sys.modules[name]
    registry.find.cache_clear()


class Letters:
    """A prompt without media: one token."""

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
        prompt = {"prompt_id": row.id, "messages": json.dumps(row.messages), "label": row.label, "source": "coins"}
        texts = {**prompt, "reward_kind": "", "sampling": json.dumps(dict(sampling))}
        ids, none = concatenate([[0]], "int32"), concatenate([[]], "int32")
        return [
            encode("prompt", {**{name: [text] for name, text in texts.items()}, "evaluation_size": [evaluation_size]}),
            encode("inputs", {"prompt_ids": ids, "placeholder_start": none, "placeholder_length": none}),
        ]


class Kept:
    def __init__(self) -> None:
        self.rows = list[Mapping[str, Any]]()

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)


class Brokers:
    """Both brokers in this process, and clients of them."""

    def __init__(self, config: Config) -> None:
        specs = [columns.spec() for columns in wiring.stages_of(config)]
        self.service = SampleService(Facts("run", to_json(config), "/nowhere"), specs, limits_of(config))
        self._samples = MemoryBroker(self.service, SystemClock())
        self._weights = MemoryBroker(WeightService("run", 2), SystemClock())
        self._channels = list[Any]()

    def client(self, role: str) -> SampleClient:
        channel = self._samples.connect(role, "1")
        client = SampleClient(channel, role)
        client.hello(role, "here", 1)
        self._channels.append(channel)
        return client

    def weight_client(self, role: str) -> WeightClient:
        client = WeightClient(self._weights.connect(role, "1"), role, "run")
        client.hello(role, "here", 1)
        return client

    def tick(self) -> None:
        self._samples.tick()
        self._weights.tick()
        for channel in self._channels:
            channel.beat()


def spelled(ids: Sequence[int]) -> str:
    return "".join(map(str, ids))


def run(config: Config, reference: stage.Stage) -> tuple[Brokers, list[Mapping[str, Any]]]:
    """Run every role in a thread of its own, as `python -m workers.<role>` runs it in a process."""
    brokers, stop, kept = Brokers(config), Stop(), Kept()
    report: Any = kept
    source = registry.create("data", config.data, config.seed)
    engine = registry.create("engine", config.engine, Path("none"), False)
    backend = registry.create("backend", config.backend, Path("none"), False)
    backend.prepare_training(registry.create("algorithm", config.algorithm), config.steps)
    rewards = RewardStage(config.reward, config.rewards)
    follower = Follower(brokers.weight_client("rollout"), 0)
    rollout = Rollout(config, engine, brokers.client("rollout"), follower, spelled, (), ())
    feed = Feed(config, source, Letters(), brokers.client("prompt"), stop)
    trainer = Trainer(config, backend, brokers.client("trainer"), brokers.weight_client("trainer"), report)
    served = {"reward": rewards, "advantage": AdvantageStage(config), "reference": reference}

    def until_stopped(turn: Callable[[], object]) -> None:
        while not stop.is_set():
            turn()

    def train() -> None:
        try:
            assert trainer.run(stop.is_set) == "finished"
        finally:
            stop.set()

    def tick() -> None:
        while not stop.wait(0.002):
            brokers.tick()
        brokers.client("end").end("finished")

    work: list[Callable[[], object]] = [train, tick, lambda: rollout.run(stop.is_set), lambda: until_stopped(feed.turn)]
    for name, one in served.items():
        client = brokers.client(name)
        work.append(lambda name=name, one=one, client=client: stage.run(name, one, client, stop.is_set, 8))
    try:
        with ThreadPoolExecutor(len(work)) as pool:
            for worker in [pool.submit(one) for one in work]:
                worker.result(60)
    finally:
        rewards.close()
    return brokers, kept.rows


def test_a_pipeline_of_six_foreign_classes_learns(extension: Path) -> None:
    config = load(extension, [], registry.options)
    even = importlib.import_module("extension.even").Even()
    brokers, rows = run(config, even)
    steps = [row for row in rows if row["kind"] == "step"]
    first, last = (row["heldout"] for row in rows if row["kind"] == "evaluation")
    assert [row["step"] for row in steps] == list(range(1, 26))
    # Heads has log-odds -1.5 at first: 1 / (1 + e^1.5) = 0.18.
    assert steps[0]["reward"] < 0.45 < 0.75 < sum(row["reward"] for row in steps[-3:]) / 3
    assert first < last
    counts = brokers.service.ledger.counts
    assert (counts.trained, counts.dead, counts.evaluated) == (100, {}, 40)


def test_the_foreign_classes_are_laid_out_as_processes_too(extension: Path) -> None:
    made = plan.make(load(extension, [], registry.options), Path("/somewhere"))
    assert {process.role for process in made.processes} >= {"rollout", "reward", "reference", "advantage", "trainer"}
    assert made.config.engine.options == {"room": 6}
    assert made.config.data.options == {"size": 1000}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("engine.rom=3", "unknown setting 'engine.rom'; did you mean 'engine.room'?"),
        ("algorithm.pull=far", "setting 'algorithm.pull' = 'far'"),
        ("reward.name=extension.heads:Tails", "has no attribute 'Tails'"),
        ("reward.name=extension.tails:Tails", "No module named 'extension.tails'"),
        ("reward.name=extension.even:Even", "not a class with nested Options"),
    ],
)
def test_a_mistake_in_their_settings_is_told_as_for_those_of_this_repository(
    extension: Path, override: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(extension, [override], registry.options)
    assert told in str(caught.value)
