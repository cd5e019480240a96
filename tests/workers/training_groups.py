"""Groups as the stages before the trainer would leave them, and two models small enough to train in milliseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from common.group import Group, GroupKey, concatenate
from common.section import encode
from workers.models.load import to_named

VOCABULARY, IMAGE, VIDEO = 18, 4, 5
_SHAPE = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,  # five times the usual: attention and pictures must move the logits by more than rounding
)


def text_folder(folder: Path, hidden: int = 32, seed: int = 0) -> Path:
    """A Qwen3 with tied embeddings."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        **_SHAPE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        head_dim=hidden // 4,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def vision_folder(folder: Path, seed: int = 0) -> Path:
    """A Qwen3-VL: patches of 4 x 4 x 2 x 3 = 96 values, 4 patches per placeholder."""
    torch.manual_seed(seed)
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True)
    text = dict(
        _SHAPE, hidden_size=32, intermediate_size=64, head_dim=8, tie_word_embeddings=False, rope_parameters=rope
    )
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=2, vision_end_token_id=3)
    transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    ).save_pretrained(folder)
    return folder


def tensors_section(tensors: Sequence[tuple[str, torch.Tensor, bool]] = ()) -> Any:
    named = [(to_named(name, tensor), per_token) for name, tensor, per_token in tensors]
    return encode(
        "tensors",
        {
            "tensor_name": [t.name for t, _ in named],
            "tensor_dtype": [t.dtype for t, _ in named],
            "tensor_shape": [list(t.shape) for t, _ in named],
            "tensor_per_token": [per_token for _, per_token in named],
            "tensor_data": [bytes(t.data) for t, _ in named],
        },
    )


def make_group(
    prompt: Sequence[int],
    responses: Sequence[Sequence[int]],
    *,
    name: str = "g",
    logprobs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
    weights: Sequence[float] | None = None,
    temperature: float = 1.0,
    tensors: Sequence[tuple[str, torch.Tensor, bool]] = (),
    runs: Sequence[tuple[int, int]] = (),
) -> Group:
    """Log-probs default to -1, advantages to 1 and weights to 1."""
    count = len(responses)
    ones = [[1.0] * len(r) for r in responses]
    logprobs = [[-1.0] * len(r) for r in responses] if logprobs is None else logprobs
    sections = [
        encode(
            "inputs",
            {
                "prompt_ids": concatenate([prompt], "int32"),
                "placeholder_start": concatenate([[start for start, _ in runs]], "int32"),
                "placeholder_length": concatenate([[length for _, length in runs]], "int32"),
            },
        ),
        encode(
            "tokens",
            {
                "response_ids": concatenate(responses, "int32"),
                "logprobs": concatenate(logprobs, "float32"),
                "temperature": [temperature] * count,
                "span_start": concatenate([[0]] * count, "int32"),
                "span_version": concatenate([[0]] * count, "int64"),
                "seed": list(range(count)),
            },
        ),
        encode(
            "advantage",
            {
                "advantages": concatenate(ones if advantages is None else advantages, "float32"),
                "loss_weight": [1.0] * count if weights is None else list(weights),
            },
        ),
        tensors_section(tensors),
    ]
    if reference is not None:
        sections.append(encode("reference", {"ref_logprobs": concatenate(reference, "float32")}))
    return Group(GroupKey(name, 0), sections={s.name: s for s in sections})


def image_group(responses: Sequence[Sequence[int]], *, name: str = "g", seed: int = 0, **more: Any) -> Group:
    """A prompt with one picture of 4 x 4 patches: 16 / 2² = 4 placeholders."""
    pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed))
    prompt = [2, IMAGE, IMAGE, IMAGE, IMAGE, 3, 7]
    tensors = [
        ("pixel_values", pixels, False),
        ("image_grid_thw", torch.tensor([[1, 4, 4]]), False),
        ("mm_token_type_ids", torch.tensor([[0, 1, 1, 1, 1, 0, 0]]), True),
    ]
    return make_group(prompt, responses, name=name, **{"tensors": tensors, "runs": [(1, 4)], **more})


def random_groups(seed: int, count: int, samples: int = 4, longest: int = 6) -> list[Group]:
    """Ragged text groups; each prompt and response has its own length, each group its own temperature."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(count):
        responses = [rng.integers(6, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(samples)]
        values = [rng.normal(0, 1, len(r)).tolist() for r in responses]
        logprobs = [(-3 + 0.3 * rng.normal(0, 1, len(r))).tolist() for r in responses]
        prompt = rng.integers(6, VOCABULARY, rng.integers(1, 6)).tolist()
        groups.append(
            make_group(
                prompt,
                responses,
                name=f"g{g}",
                logprobs=logprobs,
                advantages=values,
                reference=logprobs,
                temperature=float(rng.choice([0.0, 0.5, 1.0])),
            )
        )
    return groups
