"""Data sources: rows depend on options and seed alone."""

import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from common.errors import ConfigError
from workers.prompt.source import Row
from workers.prompt.sources.digits import Digits
from workers.prompt.sources.jsonl import Jsonl
from workers.prompt.sources.mod10 import Mod10

pytestmark = pytest.mark.unit


def asked(row: Row) -> str:
    return row.messages[0]["content"]


def test_mod10_rows_are_right_sums_and_repeat_for_the_same_seed() -> None:
    source, again, other = (Mod10(Mod10.Options(size=500), seed) for seed in (1, 1, 2))
    rows = list(source.train)
    assert len(rows) == 500
    for row in rows:
        x, y = asked(row)[:-1].split("+")
        assert asked(row).endswith("=")
        assert row.label == str((int(x) + int(y)) % 10)
    assert rows == list(again.train)
    assert rows != list(other.train)
    assert len({row.id for row in rows}) == 500
    # 500 draws from 100 pairs leave out 100 x 0.99^500 = 0.66 pairs on average.
    assert len(Counter(map(asked, rows))) > 95


def test_a_mod10_row_does_not_depend_on_the_size_of_the_source() -> None:
    assert Mod10(Mod10.Options(), 3).train[7] == Mod10(Mod10.Options(size=8), 3).train[7]


def test_all_mod10_pairs_are_held_out_by_default_and_distinct_random_ones_otherwise() -> None:
    everything = Mod10(Mod10.Options(), 1).heldout
    assert [asked(row) for row in everything] == [f"{x}+{y}=" for x in range(10) for y in range(10)]
    some = [asked(row) for row in Mod10(Mod10.Options(heldout=30), 1).heldout]
    assert len(set(some)) == 30
    assert some != [asked(row) for row in Mod10(Mod10.Options(heldout=30), 2).heldout]


def test_sequences_end_slice_and_count_from_the_end_as_lists_do() -> None:
    train = Mod10(Mod10.Options(size=5), 1).train
    assert train[-1] == train[4]
    assert list(train[1:3]) == [train[1], train[2]]
    with pytest.raises(IndexError):
        train[5]


def test_digits_are_lossless_images_of_the_data_set_split_once() -> None:
    source = Digits(Digits.Options(), 1)
    # 1,797 images: int(1797 / 6) = 299 held out, 1,498 for training.
    assert (len(source.train), len(source.heldout)) == (1498, 299)
    numbers = [row.id for part in (source.train, source.heldout) for row in part]
    assert sorted(numbers) == sorted(f"digits/{i}" for i in range(1797))
    data = load_digits()
    row = source.heldout[3]
    number = int(row.id.removeprefix("digits/"))
    assert row.label == str(data.target[number])
    pixels_HWC = np.asarray(Image.open(io.BytesIO(row.media[0].data)))
    expected_HW = (data.images[number] / 16 * 255).astype("uint8")
    assert pixels_HWC.shape == (8, 8, 3)
    assert all((pixels_HWC[:, :, channel] == expected_HW).all() for channel in range(3))
    assert row.messages == ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Q:"}]},)


def test_digits_are_split_by_the_seed_and_encoded_the_same_way_each_time() -> None:
    first, again, other = (Digits(Digits.Options(), seed) for seed in (1, 1, 2))
    assert first.train[0] == again.train[0]
    assert first.train[0].media[0].hash == first.train[0].media[0].hash
    assert {row.id for row in first.heldout} != {row.id for row in other.heldout}


def lines(folder: Path, *objects: object, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(o if isinstance(o, str) else json.dumps(o) for o in objects), encoding="utf-8")
    return path


def rows_of(path: Path, **options: str) -> Sequence[Row]:
    return Jsonl(Jsonl.Options(path=str(path), **options), 0).train


def test_jsonl_reads_prompts_messages_labels_and_media_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"PNG bytes")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Größe?"}]}]
    path = lines(
        tmp_path,
        {"prompt": "1+1=", "label": 2},
        "",
        {"messages": messages, "label": "x", "media": ["pictures/a.png"], "reward_kind": "exact", "id": "n1"},
        {"prompt": "p", "sampling": {"temperature": 0.5}},
    )
    first, second, third = rows_of(path)
    assert first == Row("train/1", ({"role": "user", "content": "1+1="},), "2")
    assert (second.id, second.messages, second.label, second.reward_kind) == ("n1", messages, "x", "exact")
    assert [(m.kind, m.format, m.data) for m in second.media] == [("image", "image/png", b"PNG bytes")]
    assert (third.id, third.label, third.sampling) == ("train/4", "", {"temperature": 0.5})


def test_jsonl_keys_are_settings_and_the_heldout_file_is_its_own(tmp_path: Path) -> None:
    path = lines(tmp_path, {"question": "q", "answer": "a"})
    heldout = lines(tmp_path, {"question": "h", "answer": "b"}, name="heldout.jsonl")
    options = Jsonl.Options(path=str(path), heldout_path=str(heldout), prompt="question", label="answer")
    source = Jsonl(options, 0)
    assert [(asked(row), row.label) for row in (*source.train, *source.heldout)] == [("q", "a"), ("h", "b")]
    assert source.heldout[0].id == "heldout/1"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "an object is expected, not list"),
        ('{"label": "x"}', "neither key 'messages' nor key 'prompt' is there"),
        ('{"prompt": 7}', "key 'prompt' must hold str, not 7"),
        ('{"prompt": "p", "label": [1]}', "key 'label' must hold text or a number"),
        ('{"prompt": "p", "media": ["a.xyz"]}', "'a.xyz': the ending names no image, video or audio format"),
        ('{"prompt": "p", "media": ["gone.png"]}', "gone.png: No such file"),
        ('{"messages": []}', "key 'messages' holds no message"),
        ('{"messages": [{"content": "x"}]}', "a message is an object with role and content"),
    ],
)
def test_a_malformed_line_is_refused_with_its_file_and_number(tmp_path: Path, line: str, reason: str) -> None:
    path = lines(tmp_path, {"prompt": "p"}, "", line)
    rows = rows_of(path)
    assert asked(rows[0]) == "p"
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 3: ") as caught:
        rows[1]
    assert reason in str(caught.value)


def test_bytes_that_are_not_utf8_name_their_line_too(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 1: "):
        rows_of(path)[0]


def test_a_file_that_is_missing_or_empty_is_refused_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting 'data\.path' = .*No such file"):
        rows_of(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match="the file holds no line"):
        rows_of(lines(tmp_path, ""))


def test_sources_and_rewards_import_neither_torch_nor_what_only_some_need() -> None:
    program = (
        "import sys\n"
        "from workers.registry import find, known\n"
        "[find(kind, name) for kind in ('data', 'reward') for name in known(kind)]\n"
        "print(sorted({'torch', 'transformers', 'sklearn', 'PIL', 'math_verify'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
