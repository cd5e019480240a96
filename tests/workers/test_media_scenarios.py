"""Acceptance scenarios of media on their way through the workers; each docstring names its id."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from brokers.client import Leased
from common.group import Group, GroupKey
from common.section import Section
from passing import prompted, step
from pipeline_parts import END, NOWHERE, ByLength, Encoder, Rows, config
from pipeline_world import World
from training_groups import image_group, make_group, tensors_section, vision_folder
from workers.advantage.stage import AdvantageStage
from workers.models.tiny import write_tiny_vision
from workers.processed import expected_placeholders, processor_tensors
from workers.prompt.encode import PromptEncoder
from workers.prompt.schedule import Schedule
from workers.prompt.source import Medium, Row
from workers.rollout.engines.fake import FakeEngine
from workers.rollout.requests import request_of

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("kept", [(1, 3), (0,), (2,), (0, 1, 3)])
@pytest.mark.parametrize("moment", ["waiting", "generated", "scored"])
def test_d9_h6_whatever_is_filtered_out_every_column_of_the_rest_is_its_own(kept: tuple[int, ...], moment: str) -> None:
    """D9, H6. Groups leave at any moment; what reaches the trainer holds the same group in all of its columns."""

    class Marked(Encoder):
        def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
            *others, _ = super().encode(row, sampling, evaluation_size)
            pixels = torch.full((4, 2), float(row.id.removeprefix("train/")))
            return [*others, tensors_section([("pixel_values", pixels, False)])]

    settings = config(engine={"name": "torch"}, backend={"name": "torch"})
    world = World(settings)
    feed, engine = world.feed(Rows(4), Marked()), FakeEngine(FakeEngine.Options(vocabulary=18), NOWHERE, False)
    generating = world.generating(*world.rollout(engine))
    scoring, advantage = world.serving("reward", ByLength()), world.serving("advantage", AdvantageStage(settings))
    feed.turn()
    moments = {"waiting": [], "generated": [generating] * 3, "scored": [generating] * 3 + [scoring]}
    for turn in moments[moment]:
        turn()
    dropped = [f"train-{seq}" for seq in range(4) if seq not in kept]
    world.client("judge").drop(dropped, "filtered")
    world.turns = [generating, scoring, advantage]
    world.work()
    leases = world.client("trainer").lease("trainer", 4, 0.0, 0, at_least=len(kept)).leases
    groups = [leased.group for leased in leases]
    assert sorted(group.key.seq for group in groups) == list(kept)
    for group in groups:
        (pixels,) = processor_tensors(group)
        number = int(pixels.tensor.numpy()[0, 0])
        place = Schedule(4, 1, settings.seed).row_of(group.key.seq)
        assert place is not None
        assert number == place[1]
        assert group.values("reward") == [float(i + group.key.seq % 3) for i in range(2)]
        request = request_of(Leased(1, _with_prompt(group)), settings, (END,), ())
        assert group.values("seed") == list(request.seeds)
        lengths = [len(ids) for ids in group.arrays("response_ids")]
        assert lengths == group.values("num_tokens") == [len(values) for values in group.arrays("advantages")]
    assert world.service.ledger.counts.dropped.total() == (0 if moment == "waiting" else len(dropped))


def _with_prompt(group: Group) -> Group:
    prompt = next(section for section in Encoder().encode(Rows(1).train[0], {}, 0) if section.name == "prompt")
    return Group(group.key, group.attempt, {**group.sections, "prompt": prompt})


@pytest.mark.parametrize(("t", "h", "w", "merge", "expected"), [(1, 8, 8, 2, 16), (4, 6, 6, 3, 16), (1, 1, 7, 1, 7)])
def test_h1_the_number_of_placeholders_is_that_of_the_merged_patches(
    t: int, h: int, w: int, merge: int, expected: int
) -> None:
    """H1. Sum of t * h * w / merge², over as many grids as there are; a rest is no placeholder and fits no number."""
    assert expected_placeholders([[t, h, w]], merge) == expected
    assert expected_placeholders([[t, h, w]] * 3, merge) == 3 * expected
    assert expected_placeholders(np.zeros((0, 3), np.int64), merge) == 0
    assert expected_placeholders([], merge) == 0
    # 1 x 3 x 3 patches over 2 x 2 are 9 / 4: two of these are not 4 placeholders, as rounding would have it.
    assert expected_placeholders([[1, 3, 3]] * 2, 2) not in range(10)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_h4_text_and_image_rows_have_the_loss_that_each_has_alone(vision: Path, order: tuple[int, ...]) -> None:
    """H4. [text, image, text] and [image, text, text] train, with equal loss per row."""
    groups = [
        make_group([7, 8], [[9, 10], [11]], name="a", advantages=[[1.0, 1.0], [-1.0]]),
        image_group([[9], [10, 11, 12]], name="i", advantages=[[0.5], [-0.5] * 3]),
        make_group([8], [[12, 13]], name="b", advantages=[[2.0, 2.0]]),
    ]
    alone = [step(vision, [group])[1] for group in groups]
    _, metrics = step(vision, [groups[i] for i in order])
    tokens = sum(one["tokens"] for one in alone)
    assert metrics["tokens"] == tokens == 9
    for name in ("loss", "entropy", "mismatch"):
        assert metrics[name] == pytest.approx(sum(one[name] * one["tokens"] for one in alone) / tokens, abs=1e-6)


def test_h7_any_output_of_the_processor_reaches_engine_and_trainer_whatever_its_name() -> None:
    """H7. Columns follow the schema, not a list of known names."""
    settings = config(engine={"name": "torch"}, backend={"name": "torch"})
    outputs = [
        ("mm_token_type_ids", torch.tensor([[0, 1, 0]]), True),
        ("brand_new_features", torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3), False),
        ("second_per_grid", torch.tensor([0.5], dtype=torch.float64), False),
    ]

    class Modern(Encoder):
        def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
            *others, _ = super().encode(row, sampling, evaluation_size)
            return [*others, tensors_section(outputs)]

    world, asked = World(settings), list[Any]()

    class Listening(FakeEngine):
        def submit(self, request: Any) -> None:
            asked.append(request)
            super().submit(request)

    engine = Listening(FakeEngine.Options(vocabulary=18), NOWHERE, False)
    world.turns = [world.feeding(world.feed(Rows(4), Modern())), world.generating(*world.rollout(engine))]
    world.turns += [world.serving("reward", ByLength()), world.serving("advantage", AdvantageStage(settings))]
    world.work()
    leases = world.client("trainer").lease("trainer", 4, 0.0, 0).leases
    expected = [(name, tuple(value.shape), per_token) for name, value, per_token in outputs]
    for parts in (*(request.tensors for request in asked), *(processor_tensors(leased.group) for leased in leases)):
        assert [(part.tensor.name, part.tensor.shape, part.per_token) for part in parts] == expected
        assert parts[1].tensor.dtype == "bfloat16"
    assert (len(asked), len(leases)) == (4, 4)


def test_h9_an_empty_list_of_images_is_text_to_the_engine_too() -> None:
    """H9. The tensors of no image are left out of the request; what follows the prompt's tokens stays."""
    nothing = tensors_section(
        [
            ("pixel_values", torch.zeros(0, 96), False),
            ("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64), False),
            ("mm_token_type_ids", torch.zeros(1, 3, dtype=torch.int64), True),
        ]
    )
    request = request_of(prompted(tensors=nothing), config(), (END,), ())
    assert [part.tensor.name for part in request.tensors] == ["mm_token_type_ids"]


def test_h11_images_of_two_turns_are_in_the_row_in_their_order_and_places(tmp_path: Path) -> None:
    """H11. Turn 1 brings image A, turn 2 image B."""
    write_tiny_vision(tmp_path, hidden=32, heads=2, kv_heads=1)
    files = [io.BytesIO(), io.BytesIO()]
    for file, level in zip(files, (0, 255), strict=True):
        Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(file, format="PNG")
    first, second = (Medium("image", "image/png", file.getvalue()) for file in files)
    messages = (
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image"}]},
        {"role": "assistant", "content": "23"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "4"}]},
    )
    sections = PromptEncoder(tmp_path).encode(Row("r", messages, "", (first, second)), {}, 0)
    group = Group(GroupKey("r", 0), 1, {section.name: section for section in sections})
    # 1 <vs> 4x<img> <ve> 2 3 <vs> 4x<img> <ve> 4: runs begin at 2 and 10.
    assert (group.value("placeholder_start"), group.value("placeholder_length")) == ([2, 10], [4, 4])
    assert group.values("media_hash") == [first.hash, second.hash]
    pixels = next(part for part in processor_tensors(group) if part.tensor.name == "pixel_values").tensor.numpy()
    assert (pixels[:16] == -1).all()
    assert (pixels[16:] == 1).all()
