"""Encoding of rows: placeholders and media stay together, and text never becomes a medium."""

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.errors import ConfigError, Reject
from common.group import Group, GroupKey
from common.tensor import NamedTensor, from_numpy
from workers.models.tiny import VISION_CHARACTERS, write_tiny_text, write_tiny_vision
from workers.prompt.encode import PromptEncoder, check_placeholders, is_per_token, runs_of
from workers.prompt.source import Medium, Row
from workers.prompt.sources.digits import Digits
from workers.prompt.sources.mod10 import Mod10

pytestmark = pytest.mark.unit

# Ids of the tiny models: pad 0, end 1, unknown 2, then <vs> 3, <ve> 4, <img> 5, <vid> 6 where there are media.
VISION_START, VISION_END, IMAGE, FIRST_CHARACTER = 3, 4, 5, 7
CHARACTERS = "".join(dict.fromkeys(VISION_CHARACTERS))


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("text")
    write_tiny_text(folder, hidden=32)
    return PromptEncoder(folder, "mod10")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vision(folder, hidden=32, heads=2, kv_heads=1)
    return PromptEncoder(folder, "digits")


def encoded(encoder: PromptEncoder, row: Row, sampling: Mapping[str, Any] | None = None, size: int = 0) -> Group:
    sections = encoder.encode(row, sampling or {}, size)
    return Group(GroupKey(row.id, 0), sections={section.name: section for section in sections})


def tensors(group: Group) -> dict[str, NamedTensor]:
    fields = ("tensor_name", "tensor_dtype", "tensor_shape", "tensor_data")
    found = zip(*(group.values(name) for name in fields), strict=True)
    return {name: NamedTensor(name, dtype, tuple(shape), data) for name, dtype, shape, data in found}


def picture(height: int = 8, width: int = 8, level: int = 100) -> Medium:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), level, np.uint8)).save(file, format="PNG")
    return Medium("image", "image/png", file.getvalue())


def asked(*parts: str | Medium, name: str = "r") -> Row:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind} for p in parts]
    media = tuple(part for part in parts if isinstance(part, Medium))
    return Row(name, ({"role": "user", "content": content},), "1", media)


def ids_of(text: str) -> list[int]:
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def test_a_text_row_has_ids_and_empty_media(text_encoder: PromptEncoder) -> None:
    row = Mod10(Mod10.Options(), 0).heldout[39]
    group = encoded(text_encoder, row, {"temperature": 0.0}, 100)
    # Characters "0123456789+=rcs" follow three special tokens: 3 -> 6, + -> 13, 9 -> 12, = -> 14.
    assert group.arrays("prompt_ids")[0].tolist() == [6, 13, 12, 14]
    assert group.value("placeholder_start") == group.value("placeholder_length") == []
    assert group.values("media_hash") == group.values("tensor_name") == []
    assert json.loads(group.value("messages")) == [{"role": "user", "content": "3+9="}]
    facts = {name: group.value(name) for name in ("prompt_id", "label", "source", "reward_kind", "evaluation_size")}
    assert facts == {
        "prompt_id": "mod10/heldout/39",
        "label": "2",
        "source": "mod10",
        "reward_kind": "",
        "evaluation_size": 100,
    }
    assert json.loads(group.value("sampling")) == {"temperature": 0.0}


def test_settings_of_the_call_override_those_of_the_row(text_encoder: PromptEncoder) -> None:
    row = Row("r", ({"role": "user", "content": "1"},), "", (), "exact", {"temperature": 0.5, "max_tokens": 3})
    group = encoded(text_encoder, row, {"temperature": 0.0})
    assert json.loads(group.value("sampling")) == {"temperature": 0.0, "max_tokens": 3}
    assert group.value("reward_kind") == "exact"


def test_an_image_row_carries_placeholders_bytes_hash_and_every_processor_output(encoder: PromptEncoder) -> None:
    row = Digits(Digits.Options(), 0).train[0]
    group = encoded(encoder, row)
    # The 8x8 image becomes 16x16 pixels, 4x4 patches of 4x4 pixels, merged 2x2: 4 placeholders.
    expected = [VISION_START, *[IMAGE] * 4, VISION_END, *ids_of("Q:")]
    assert group.arrays("prompt_ids")[0].tolist() == expected
    assert (group.value("placeholder_start"), group.value("placeholder_length")) == ([1], [4])
    assert group.values("media_data") == [row.media[0].data]
    assert group.values("media_hash") == [row.media[0].hash]
    assert (group.values("media_kind"), group.values("media_format")) == (["image"], ["image/png"])
    parts = json.loads(group.value("messages"))[0]["content"]
    assert parts == [{"type": "image", "hash": row.media[0].hash}, {"type": "text", "text": "Q:"}]
    found = tensors(group)
    assert set(found) == {"mm_token_type_ids", "pixel_values", "image_grid_thw"}
    assert found["image_grid_thw"].numpy().tolist() == [[1, 4, 4]]
    assert found["mm_token_type_ids"].numpy().tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    assert (found["pixel_values"].dtype, found["pixel_values"].shape) == ("float32", (16, 96))
    per_token = dict(zip(group.values("tensor_name"), group.values("tensor_per_token"), strict=True))
    assert per_token == {"mm_token_type_ids": True, "pixel_values": False, "image_grid_thw": False}


def test_pixels_are_those_of_the_processor_on_the_original_image(encoder: PromptEncoder) -> None:
    # Grey level 100, rescaled and normalised with mean and deviation 0.5: 100 / 255 x 2 - 1 = -0.2157.
    pixels = tensors(encoded(encoder, asked(picture(level=100), "Q:")))["pixel_values"].numpy()
    np.testing.assert_allclose(pixels, 100 / 255 * 2 - 1, atol=1e-6)


def test_two_images_keep_their_order_and_positions(encoder: PromptEncoder) -> None:
    dark, light = picture(level=0), picture(level=255)
    group = encoded(encoder, asked("1", dark, "2", light, "3"))
    # 1 <vs> 4x<img> <ve> 2 <vs> 4x<img> <ve> 3: runs begin at 2 and 9.
    assert (group.value("placeholder_start"), group.value("placeholder_length")) == ([2, 9], [4, 4])
    assert group.values("media_hash") == [dark.hash, light.hash]
    pixels = tensors(group)["pixel_values"].numpy()
    assert pixels.shape == (32, 96)
    assert (pixels[:16] == -1).all()
    assert (pixels[16:] == 1).all()


def test_a_text_row_of_a_multimodal_model_has_no_media_but_its_type_ids(encoder: PromptEncoder) -> None:
    row = Row("r", ({"role": "user", "content": "Q:5"},), "5", ())
    group = encoded(encoder, row)
    assert group.arrays("prompt_ids")[0].tolist() == ids_of("Q:5")
    assert group.value("placeholder_start") == []
    assert group.sections["media"].info.rows == 0
    assert tensors(group)["mm_token_type_ids"].numpy().tolist() == [[0, 0, 0]]


def test_text_that_looks_like_another_models_placeholder_is_text(encoder: PromptEncoder) -> None:
    group = encoded(encoder, asked("<image>"))
    assert len(group.arrays("prompt_ids")[0]) == len("<image>")
    assert IMAGE not in group.arrays("prompt_ids")[0]
    assert group.value("placeholder_start") == []


@pytest.mark.parametrize("parts", [("<img>",), (picture(), "what is <img>?"), ("a<vid>b",)])
def test_text_that_is_the_models_own_placeholder_is_refused(encoder: PromptEncoder, parts: tuple[Any, ...]) -> None:
    with pytest.raises(Reject, match=r"prompt 'n7': its text holds '<(img|vid)>'"):
        encoder.encode(asked(*parts, name="n7"), {}, 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row("n7", asked(picture()).messages, "", ()), "its messages hold 1 parts of type image, its media 0"),
        (Row("n7", asked("Q:").messages, "", (picture(),)), "its messages hold 0 parts of type image, its media 1"),
        (asked(Medium("image", "image/png", picture().data[:50]), name="n7"), "cannot be decoded"),
        (asked(Medium("image", "image/png", b"not a picture"), name="n7"), "cannot be decoded"),
        (asked(picture(2, 600), name="n7"), "the processor refuses it: absolute aspect ratio"),
        (asked("\ud800", name="n7"), "its text is not Unicode"),
        (Row("n7", ({"role": "user", "content": ["Q:"]},), "", ()), "a part of a message is an object"),
    ],
)
def test_a_row_that_cannot_be_encoded_is_refused_by_name(encoder: PromptEncoder, row: Row, reason: str) -> None:
    with pytest.raises(Reject, match="prompt 'n7': ") as caught:
        encoder.encode(row, {}, 0)
    assert reason in str(caught.value)


def test_media_for_a_model_without_eyes_or_ears_is_a_mistake_of_the_configuration(
    encoder: PromptEncoder, text_encoder: PromptEncoder
) -> None:
    with pytest.raises(ConfigError, match=r"'r' holds image, which the model in .* does not take"):
        text_encoder.encode(asked(picture()), {}, 0)
    with pytest.raises(ConfigError, match=r"'r' holds audio, which the model in .* does not take"):
        encoder.encode(asked(Medium("audio", "audio/wav", b"")), {}, 0)


def test_a_decoder_that_is_not_installed_is_named(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match="the data hold video, which needs a package: pip install av"):
        encoder.encode(asked(Medium("video", "video/mp4", b"")), {}, 0)


def test_a_folder_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    write_tiny_text(tmp_path, hidden=32, chat_template="")
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptEncoder(tmp_path)


def test_a_template_may_refuse_a_row(tmp_path: Path) -> None:
    write_tiny_text(tmp_path, hidden=32, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Reject, match="prompt 'r': the chat template refuses its messages: roles must alternate"):
        PromptEncoder(tmp_path).encode(asked("1"), {}, 0)


@pytest.mark.parametrize("num_found", [15, 17])
def test_one_placeholder_too_few_or_too_many_is_refused_with_both_numbers(num_found: int) -> None:
    # 1 x 8 x 8 patches merged 2 x 2 are 16 placeholders.
    check_placeholders("image", 16, [[1, 8, 8]], 2)
    check_placeholders("video", 0, [], 2)
    with pytest.raises(Reject, match=f"{num_found} image placeholders, but its image features fill 16"):
        check_placeholders("image", num_found, [[1, 8, 8]], 2)


def test_runs_end_where_the_id_changes() -> None:
    starts, lengths = runs_of(np.array([5, 5, 1, 6, 6, 6, 5, 0]), [5, 6])
    assert (starts.tolist(), lengths.tolist()) == ([0, 3, 6], [2, 3, 1])
    for empty in (runs_of(np.array([1, 2]), [5]), runs_of(np.array([], np.int64), [5])):
        assert [part.tolist() for part in empty] == [[], []]


def test_a_mask_that_is_as_long_as_the_prompt_by_chance_is_not_per_token() -> None:
    ids, mask = np.zeros((1, 9), np.int64), np.ones((1, 9), np.int32)
    assert is_per_token(from_numpy("mm_token_type_ids", ids), 9)
    assert not is_per_token(from_numpy("mm_token_type_ids", ids), 8)
    assert not is_per_token(from_numpy("feature_attention_mask", mask), 9)
    assert not is_per_token(from_numpy("token_type_ids", ids.astype(np.float32)), 9)
