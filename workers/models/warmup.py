"""Supervised updates on labelled rows, so that a policy of random weights answers in the right form now and then."""

from pathlib import Path

import numpy as np
import torch

from common.group import Group, GroupKey, concatenate
from common.section import Section, encode
from common.seeds import seed_of
from workers.models.batch import read_rows
from workers.models.forward import Scorer
from workers.models.load import load_model, load_processor, stop_ids
from workers.prompt.encode import PromptEncoder
from workers.prompt.source import Row, Source


def warm_up(folder: Path, source: Source, steps: int, rows: int, lr: float, seed: int) -> None:
    """Make `steps` updates on `rows` training rows each (label and end mark as the response); write the model back."""
    if not steps:
        return
    model, encoder = load_model(folder), PromptEncoder(folder)
    processor = load_processor(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    (end,) = stop_ids(folder)
    scorer = Scorer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(seed_of(seed, "warm-up"))
    model.train()
    for _ in range(steps):
        numbers = order.choice(len(source.train), rows)
        groups = [_labelled(encoder, source.train[int(number)], tokenizer, end) for number in numbers]
        batch = read_rows(groups, scorer.rules)
        logprob_RT, _ = scorer.score(batch, np.arange(rows))
        num_tokens = sum(len(group.arrays("response_ids")[0]) for group in groups)
        optimizer.zero_grad()
        (-logprob_RT.sum() / num_tokens).backward()
        optimizer.step()
    model.eval()
    model.save_pretrained(folder)


def _labelled(encoder: PromptEncoder, row: Row, tokenizer: object, end: int) -> Group:
    """Return a group of one sample whose response is the label."""
    ids = [*tokenizer(row.label, add_special_tokens=False)["input_ids"], end]  # pyright: ignore[reportCallIssue]
    tokens = encode(
        "tokens",
        {
            "response_ids": concatenate([ids], "int32"),
            "logprobs": concatenate([[0.0] * len(ids)], "float32"),
            "temperature": [1.0],
            "span_start": concatenate([[0]], "int32"),
            "span_version": concatenate([[0]], "int64"),
            "seed": [0],
        },
    )
    sections: dict[str, Section] = {section.name: section for section in (*encoder.encode(row, {}, 0), tokens)}
    return Group(GroupKey(row.id, 0), sections=sections)
