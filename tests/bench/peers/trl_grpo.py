"""The TRL side of the end-to-end benchmark: `GRPOTrainer` on a CPU, timed in samples per second.

    python -m venv trl && trl/bin/pip install -r tests/bench/peers/trl.txt
    OMP_NUM_THREADS=1 trl/bin/python tests/bench/peers/trl_grpo.py --model DIR --prompts FILE.jsonl --json trl.json

It runs in a virtual environment of its own, because TRL's pins are not ours. For `--threads 2` set OMP_NUM_THREADS=2,
and OMP_WAIT_POLICY=PASSIVE where other work shares the cores: spinning threads made it 20 times slower there.

What both sides have to agree on:

* A step takes the next `--prompts-per-step` lines of the prompts file, from the top again after the last one, with
  `--group-size` samples each, and does one AdamW step on all of them (betas 0.9 and 0.95, no weight decay, constant
  rate, gradients clipped at 1).
* The end mark is never sampled. A response has exactly `--max-new-tokens` tokens (`fixed`), or sample `j` of the prompt
  on line `i` has exactly `length_of(i, j, max_new_tokens)` of them (`long-tail`), all sampled at temperature 1.
* The reward is 1 for a response that starts with the answer, else 0.
* The loss is clipped (0.2 / 0.28), a mean over all tokens of the step, group-normalised, without KL, all in fp32.

TRL's bf16 and gradient checkpointing, which are slower here, are off. The first two steps warm up and are not timed.

The JSON file holds `samples_per_s`; `steps` and `tokens`, both of the whole run; `wall_s` and the `generate_s` in it,
both of the timed steps; `samples_per_s_median`, from the median timed step, for a machine that others use too;
`rewards`, the mean of each step; `threads` and `micro_batch`.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a script finds only its own folder
from tests.bench.lengths import length_of

WARMUP_STEPS = 2


class RowLimits(StoppingCriteria):
    """Ends each row of the running `generate` after its own number of new tokens."""

    def __init__(self) -> None:
        self.last_positions_B = torch.empty(0, dtype=torch.long)

    def set(self, num_prompt_tokens: int, num_new_tokens: list[int]) -> None:
        self.last_positions_B = num_prompt_tokens + torch.tensor(num_new_tokens)

    def __call__(
        self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor] | None, **kwargs: object
    ) -> torch.BoolTensor:
        return cast(torch.BoolTensor, self.last_positions_B <= input_ids.shape[1])


class LimitedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 whose `generate` obeys `row_limits`, since GRPOTrainer has no argument for stopping criteria."""

    row_limits: RowLimits | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.row_limits is not None:
            kwargs["stopping_criteria"] = StoppingCriteriaList([self.row_limits])
        return cast(Any, super()).generate(*args, **kwargs)  # its self type does not name what Qwen3 has


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that counts tokens and seconds of generation, and holds each sample to its length."""

    limits: RowLimits
    long_tail: bool
    cap: int
    group_size: int
    tokens: int = 0
    generate_s: float = 0.0
    num_new_tokens: list[int]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.num_new_tokens = [  # the samples of a prompt are neighbours
            length_of(row["line"], k % self.group_size, self.cap) if self.long_tail else self.cap
            for k, row in enumerate(inputs)
        ]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        self.limits.set(max(map(len, prompt_ids)), self.num_new_tokens)
        start = time.perf_counter()
        made: tuple[list[list[int]], Any] = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generate_s += time.perf_counter() - start
        # Where padding is the end mark, TRL keeps one token of it: it is not part of the response.
        completion_ids = [ids[:n] for ids, n in zip(made[0], self.num_new_tokens, strict=True)]
        if [len(ids) for ids in completion_ids] != self.num_new_tokens:
            raise RuntimeError("TRL generated other lengths than prescribed")
        self.tokens += sum(self.num_new_tokens)
        return completion_ids, made[1]


class Clock(TrainerCallback):
    """The times at which the steps end, and the seconds of generation up to the end of the warm-up."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.trainer: TimedTrainer | None = None
        self.warmup_generate_s = 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARMUP_STEPS and self.trainer is not None:
            self.warmup_generate_s = self.trainer.generate_s


class StartsWithAnswer:
    """The reward, which also keeps the mean of each step."""

    __name__ = "starts_with_answer"  # TRL asks for it

    def __init__(self) -> None:
        self.means: list[float] = []

    def __call__(self, completions: list[str], answer: list[str], **kwargs: object) -> list[float | None]:
        rewards = [float(text.startswith(right)) for text, right in zip(completions, answer, strict=True)]
        self.means.append(statistics.fmean(rewards))
        return [*rewards]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL's GRPOTrainer on a CPU and time it.")
    parser.add_argument("--model", required=True, help="folder of a Qwen3 and its tokenizer")
    parser.add_argument("--prompts", required=True, type=Path, help='lines of {"prompt": ..., "answer": ...}')
    parser.add_argument("--json", required=True, type=Path, help="file to write the figures to")
    parser.add_argument("--steps", type=int, default=12, help=f"optimizer steps, {WARMUP_STEPS} of them untimed")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--lengths", choices=("fixed", "long-tail"), default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--micro-batch", type=int, help="samples in one backward pass (default: all of a step)")
    args = parser.parse_args()
    args.batch = args.prompts_per_step * args.group_size
    args.micro_batch = args.micro_batch or args.batch
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} of the warm-up")
    if args.batch % args.micro_batch:
        parser.error(f"--micro-batch must divide prompts-per-step * group-size = {args.batch}")
    return args


def read_prompts(path: Path, count: int) -> Dataset:
    """`count` rows `prompt`, `answer`, `line`; over again from the first line when the file is shorter."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    numbers = [k % len(lines) for k in range(count)]
    columns = {
        "prompt": [lines[i]["prompt"] for i in numbers],
        "answer": [lines[i]["answer"] for i in numbers],
        "line": numbers,
    }
    return Dataset.from_dict(columns)


def settings(args: argparse.Namespace, output_dir: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=args.seed,
        max_steps=args.steps,
        # One `generate` makes all samples of a step, so that TRL needs no forward pass for old log-probs.
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.batch // args.micro_batch,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        generation_kwargs={"min_new_tokens": args.max_new_tokens},  # masks the end mark out
        shuffle_dataset=False,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(args: argparse.Namespace, output_dir: str) -> dict[str, Any]:
    model = LimitedQwen3ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(args.model, padding_side="left"))
    clock, reward, limits = Clock(), StartsWithAnswer(), RowLimits()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(args, output_dir),
        train_dataset=read_prompts(args.prompts, args.steps * args.prompts_per_step),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.limits, trainer.long_tail = limits, args.lengths == "long-tail"
    trainer.cap, trainer.group_size = args.max_new_tokens, args.group_size
    model.row_limits = limits if trainer.long_tail else None  # `fixed` needs no criterion but max_new_tokens
    trainer.train()

    timed = clock.ends[WARMUP_STEPS - 1 :]
    wall_s = timed[-1] - timed[0]
    step_s = [end - start for start, end in itertools.pairwise(timed)]
    return {
        "samples_per_s": len(step_s) * args.batch / wall_s,
        "steps": len(clock.ends),
        "tokens": trainer.tokens,
        "wall_s": wall_s,
        "generate_s": trainer.generate_s - clock.warmup_generate_s,
        "samples_per_s_median": args.batch / statistics.median(step_s),
        "rewards": reward.means,
        "threads": torch.get_num_threads(),
        "micro_batch": args.micro_batch,
    }


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as output_dir:
        figures = train(args, output_dir)
    args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
