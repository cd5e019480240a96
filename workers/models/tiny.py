"""Builders of tiny models with random weights, for tests and for runs that start from nothing.

Each writes a complete Hugging Face folder: configuration, weights, tokenizer or processor, chat template, generation
configuration. Nothing is fetched; equal arguments write equal files.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHARACTERS = "0123456789+=rcs"
VISION_CHARACTERS = "0123456789LRUDQ:<>. seconds"
"""Holds the characters of `<0.5 seconds>`, with which the processor marks the frames of a video."""

_PAD, _END, _UNKNOWN = "<pad>", "<eos>", "<unk>"
_MEDIA = {"vision_start_token": "<vs>", "vision_end_token": "<ve>", "image_token": "<img>", "video_token": "<vid>"}

CONCATENATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<vs><img><ve>{% elif c.type == 'video' %}<vs><vid><ve>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""Chat template: the contents one after another, a placeholder for each medium, no role and no other mark."""


def write_tiny_text(
    folder: Path,
    *,
    characters: str = CHARACTERS,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 128,
    chat_template: str = CONCATENATE,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> None:
    """Write a Qwen3 with tied embeddings and a tokenizer of one token per character (ids 0 to 2: pad, end, unknown)."""
    tokenizer = _tokenizer(characters, {}, chat_template)
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "context": context}
    torch.manual_seed(seed)
    config = Qwen3Config(
        **_decoder(vocabulary=len(tokenizer), **sizes),
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        **_ends(tokenizer),
    )
    _save(folder, Qwen3ForCausalLM(config), tokenizer, tokenizer)


def write_tiny_vision(
    folder: Path,
    *,
    characters: str = VISION_CHARACTERS,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    depth: int = 2,
    patch: int = 4,
    image_pixels: int = 256,
    frames: int = 8,
    chat_template: str = CONCATENATE,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> None:
    """Write a Qwen3-VL and its processor for images and videos.

    `depth`: layers of the vision tower; `image_pixels`: pixels that an image, or a frame, is resized to; `frames`: most
    frames of a video at that size. An image takes image_pixels / (2 patch)² tokens.
    """
    tokenizer = _tokenizer(characters, _MEDIA, chat_template)
    tower: dict[str, Any] = {"patch_size": patch, "temporal_patch_size": 2}
    size = {"shortest_edge": image_pixels, "longest_edge": image_pixels}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            **tower, merge_size=2, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        video_processor=Qwen3VLVideoProcessor(
            **tower, merge_size=2, size={**size, "longest_edge": image_pixels * frames}, cap_pixels_per_frame=False
        ),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )
    head = hidden // heads
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    rope["mrope_section"] = [head // 4, head // 8, head // 8]
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "context": context}
    scale = {"initializer_range": initializer_range}
    text = {**_decoder(vocabulary=len(tokenizer), **sizes), **scale, "rope_parameters": rope}
    vision = {
        **tower,
        **scale,
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": heads,
        "spatial_merge_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in _MEDIA.items()}
    torch.manual_seed(seed)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **scale, **ids, **_ends(tokenizer))
    _save(folder, Qwen3VLForConditionalGeneration(config), tokenizer, processor)


def _tokenizer(characters: str, media: dict[str, str], chat_template: str) -> PreTrainedTokenizerFast:
    special = [_PAD, _END, _UNKNOWN, *media.values()]
    vocabulary = {token: i for i, token in enumerate([*special, *dict.fromkeys(characters)])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=_END,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        extra_special_tokens=media,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _decoder(*, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, context: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
    }


def _ends(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def _save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, processor: Any) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
