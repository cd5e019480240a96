"""A run from its start to its end: what it leaves behind, in every mode, and how many groups it trains."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runs import FAKE, ROLES, TINY, Run, started, with_model

pytestmark = pytest.mark.e2e

SUMMARY = {
    "name", "run", "mode", "seed", "state", "reason", "steps", "wall_s", "samples_per_s", "reward_first", "reward_last",
    "heldout_first", "heldout_last", "staleness_max", "max_staleness", "groups", "folder",
}  # fmt: skip


def test_a_run_ends_with_code_0_and_says_in_a_few_lines_what_it_came_to(finished: Run) -> None:
    assert (finished.up.returncode, finished.stderr) == (0, "")
    assert len(finished.stdout.splitlines()) < 30
    assert "tiny finished: 8 steps" in finished.stdout


def test_the_summary_has_every_number(finished: Run) -> None:
    summary = finished.summary
    assert summary.keys() == SUMMARY
    assert (summary["name"], summary["mode"], summary["state"], summary["steps"]) == ("tiny", "async", "finished", 8)
    # 8 steps of 4 groups; nothing was dropped, since the default policy waits for stragglers
    assert summary["groups"] == {"started": 32, "trained": 32, "dropped": 0, "dead": 0}
    assert summary["staleness_max"] <= summary["max_staleness"] == 1
    assert [row["heldout"] for row in finished.rows("evaluation")] == [
        summary["heldout_first"],
        summary["heldout_last"],
    ]


def test_every_step_is_a_row_of_metrics_and_of_tensorboard(finished: Run) -> None:
    rows = finished.rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert {row["samples"] for row in rows} == {16}
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert [row["version"] for row in finished.rows("evaluation")] == [0, 8]
    assert list((finished.folder / "tensorboard").glob("events.*"))
    assert (finished.folder / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_checkpoint_is_a_hugging_face_model(finished: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - seconds, for this test alone

    import workers.models  # noqa: F401, PLC0415 - makes transformers importable beside a torchvision for CUDA

    folder = finished.folder / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.num_parameters() > 0
    assert tokenizer.decode(tokenizer("3+9=")["input_ids"]).replace(" ", "") == "3+9="


def test_every_role_was_a_process_of_its_own_and_none_is_left(finished: Run) -> None:
    assert finished.groups.keys() == set(ROLES)
    assert len(set(finished.groups.values())) == len(ROLES) == 8
    assert finished.left() == []


def test_no_process_complains(finished: Run) -> None:
    complaints = {
        name: line
        for name, text in finished.logs().items()
        for line in text.splitlines()
        if any(word in line for word in ("Traceback", "Error", "[error", "[warning"))
    }
    assert complaints == {}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[int, Run]]:
    """Two runs side by side that end with their data: 7 prompts once; 10 prompts twice, or 8 steps."""
    cwd = tmp_path_factory.mktemp("short")
    (cwd / "endless.toml").write_text(TINY.read_text().replace("steps = 8", ""))
    shared = ["mode=hybrid", with_model(model), *FAKE, "evaluation.prompts=0", "algorithm.kl=0.0"]
    with ExitStack() as stack:
        runs: dict[int, Run] = {}
        for count, limits in ((7, ["epochs=1"]), (10, ["epochs=2", "steps=8"])):
            rows = [{"id": f"row-{row}", "prompt": f"{row}+1=", "label": str(row + 1)} for row in range(count)]
            (cwd / f"{count}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
            data = f'data={{name="jsonl", path="{cwd}/{count}.jsonl"}}'
            overrides = [*shared, data, *limits, f"name=rows-{count}"]
            runs[count] = stack.enter_context(started(cwd, *overrides, config=cwd / "endless.toml"))
        for run in runs.values():
            run.end()
        yield runs


def test_7_prompts_in_steps_of_4_are_steps_of_4_and_3_and_a_clean_end(short: dict[int, Run]) -> None:
    run = short[7]
    assert run.up.returncode == 0, run.stdout + run.stderr
    assert [row["groups"] for row in run.rows()] == [4, 3]
    assert run.summary["groups"] == {"started": 7, "trained": 7, "dropped": 0, "dead": 0}


def test_10_prompts_in_2_epochs_start_exactly_20_groups_before_the_limit_of_steps(short: dict[int, Run]) -> None:
    run = short[10]
    assert run.up.returncode == 0, run.stdout + run.stderr
    assert run.summary["groups"] == {"started": 20, "trained": 20, "dropped": 0, "dead": 0}
    assert run.summary["steps"] == 5
