import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import Reject
from common.group import Group
from training_groups import make_group, text_folder
from workers import registry
from workers.algorithms.grpo import Grpo
from workers.models.load import load_model
from workers.trainer.backend import Backend

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


def backend(folder: Path, **options: Any) -> Backend:
    kind = registry.find("backend", "fake")
    made = kind(kind.Options(**options), folder, False)
    made.prepare_training(Grpo(Grpo.Options()), None)
    return made


def bits(of: Backend) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in of.weights()}


GROUPS = [
    make_group([3, 4], [[5, 6, 1], [7]], name="a", advantages=[[0.5, 0.5, 0.5], [-2.0]]),
    make_group([3, 4], [[8], [9, 1]], name="b", advantages=[[1.0], [-1.0, -1.0]]),
]


def test_weights_have_the_names_shapes_and_dtypes_of_the_model(folder: Path) -> None:
    state = load_model(folder).state_dict()
    del state["lm_head.weight"]  # tied to the embedding
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in backend(folder).weights()}
    assert found == {name: ("float32", tuple(value.shape)) for name, value in state.items()}


def test_a_folder_without_weights_gets_a_single_tensor_that_the_fake_engine_takes(tmp_path: Path) -> None:
    (tensor,) = backend(tmp_path).weights()
    kind = registry.find("engine", "fake")
    engine = kind(kind.Options(), tmp_path, False)
    engine.load(1, [tensor])
    assert engine.version == 1


def test_the_fake_engine_takes_the_weights_of_every_update(folder: Path) -> None:
    kind = registry.find("engine", "fake")
    engine, made = kind(kind.Options(vocabulary=18), folder, False), backend(folder)
    for version in (1, 2):
        made.accumulate(GROUPS)
        made.update()
        engine.load(version, list(made.weights()))
        assert engine.version == version


def test_weights_depend_on_the_groups_of_each_update_and_not_on_their_order(folder: Path) -> None:
    together, apart, other, split = (backend(folder) for _ in range(4))
    first = bits(together)
    together.accumulate(GROUPS)
    for group in reversed(GROUPS):
        apart.accumulate([group])
        split.accumulate([group])
        split.update()
    other.accumulate([GROUPS[0], GROUPS[0]])
    for made in (together, apart, other):
        made.update()
    assert bits(together) == bits(apart)
    assert len({tuple(states.values()) for states in (first, bits(together), bits(other), bits(split))}) == 4


def test_metrics_count_the_tokens_with_weight_and_average_the_advantages(folder: Path) -> None:
    made = backend(folder)
    made.accumulate(GROUPS)
    # Tokens 3 + 1 + 1 + 2 = 7; advantages 3 * 0.5 - 2.0 + 1.0 - 2 * 1.0 = -1.5.
    metrics = made.update()
    assert metrics["tokens"] == 7
    assert metrics["loss"] == pytest.approx(1.5 / 7)
    assert made.update()["tokens"] == 0


def test_a_group_with_columns_of_unequal_length_is_refused_and_nothing_is_counted(folder: Path) -> None:
    broken = make_group([3], [[5, 6], [7]], name="broken", advantages=[[0.5], [0.5]])
    made, untouched = backend(folder), backend(folder)
    with pytest.raises(Reject, match="group broken: advantages"):
        made.accumulate([GROUPS[0], broken])
    made.update()
    untouched.update()
    assert bits(made) == bits(untouched)


def test_reference_log_probs_are_a_function_of_the_tokens(folder: Path) -> None:
    scored = backend(folder).logprobs(GROUPS)
    assert [[len(sample) for sample in samples] for samples in scored] == [[3, 1], [1, 2]]
    assert all(((sample > -4) & (sample < 0)).all() for samples in scored for sample in samples)
    again = backend(folder).logprobs([Group(GROUPS[0].key, 2, GROUPS[0].sections)])
    assert all(np.array_equal(a, b) for a, b in zip(again[0], scored[0], strict=True))


def test_time_is_waited_for_and_not_computed(folder: Path) -> None:
    made = backend(folder, seconds_per_group=0.02, seconds_per_update=0.03)
    began, worked = time.monotonic(), time.thread_time()
    made.accumulate(GROUPS)
    assert time.monotonic() - began >= 2 * 0.02
    made.update()
    assert time.monotonic() - began >= 2 * 0.02 + 0.03
    assert time.thread_time() - worked < 0.04  # the rest of the 0.07 s is somebody else's


def test_a_checkpoint_is_a_marker_that_tells_the_updates(folder: Path, tmp_path: Path) -> None:
    made = backend(folder)
    made.accumulate(GROUPS)
    made.update()
    made.save(tmp_path / "checkpoint")
    assert json.loads((tmp_path / "checkpoint" / "fake.json").read_text())["updates"] == 1


def test_it_works_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from workers import registry\n"
        "kind = registry.find('backend', 'fake')\n"
        f"made = kind(kind.Options(), pathlib.Path({str(tmp_path)!r}), False)\n"
        "made.update()\n"
        "assert list(made.weights())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
