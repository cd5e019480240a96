"""A Hugging Face folder as a model and a processor, local files only, and its tensors as named bytes and back."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, PretrainedConfig, PreTrainedModel

from common.errors import ConfigError
from common.tensor import BFLOAT16, NamedTensor, from_numpy

transformers.utils.logging.disable_progress_bar()  # standard error carries log lines alone

Processor: TypeAlias = Any
"""A tokenizer, or a processor that holds one as `.tokenizer`; transformers gives the two no common type."""

_MEDIA_TOKEN = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa)_(\w+_)?token_(id|index)|(boi|eoi|boa|eoa)_token_\w+"
)


def load_model(folder: Path, *, dtype: str | None = None, device: str = "cpu") -> PreTrainedModel:
    """Load the class that `config.json` names as its architecture, in evaluation mode.

    `dtype`: a torch name such as `bfloat16`; None means float32 on a CPU and the checkpoint's own elsewhere. Raises
    `ConfigError` when the folder holds no model that transformers knows.
    """
    config = load_config(folder)
    architectures: list[str] = config.architectures or []
    model_class: Any = getattr(transformers, architectures[0], None) if architectures else None
    if model_class is None:
        raise ConfigError(f"setting 'model.path': {folder}/config.json names no known architecture: {architectures}")
    wanted = dtype or ("float32" if torch.device(device).type == "cpu" else "auto")
    try:
        model = model_class.from_pretrained(folder, dtype=wanted, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"setting 'model.path': {folder} cannot be loaded: {error}") from error
    return model.to(device).eval()


def load_processor(folder: Path) -> Processor:
    """Load the folder's processor, or its tokenizer where the model knows no media."""
    try:
        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"setting 'model.path': {folder} has no processor or tokenizer: {error}") from error


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the generation config, else of the model config; empty if neither has one."""
    path = folder / "generation_config.json"
    found: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    config = load_config(folder)
    for settings in (config.get_text_config().to_dict(), config.to_dict()):
        found = settings.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text without special tokens."""
    processor = load_processor(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def media_token_ids(model_config: PretrainedConfig) -> tuple[int, ...]:
    """Return the ids of media placeholders and of the marks around them, ascending.

    They must never be sampled: the next forward pass would find more placeholders than media features. Engine and
    trainer give them a logit of minus infinity alike, or their log-probs would differ.
    """
    settings: dict[str, Any] = model_config.to_dict()
    settings = {**settings, **(settings.get("thinker_config") or {})}
    return tuple(
        sorted({v for k, v in settings.items() if _MEDIA_TOKEN.fullmatch(k) and isinstance(v, int) and v >= 0})
    )


def to_torch(tensor: NamedTensor) -> torch.Tensor:
    """Return a CPU tensor; it shares writable bytes and copies read-only ones, since torch has no read-only tensors."""
    array = tensor.numpy()
    values = torch.from_numpy(array if array.flags.writeable else array.copy())
    return values.view(torch.bfloat16) if tensor.dtype == BFLOAT16 else values


def to_named(name: str, tensor: torch.Tensor) -> NamedTensor:
    """Return the values as named bytes; they share memory with a contiguous CPU tensor."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return from_numpy(name, values.view(torch.uint16).numpy(), BFLOAT16)
    return from_numpy(name, values.numpy())


def load_config(folder: Path) -> PretrainedConfig:
    """Read the model's configuration; raises `ConfigError` when the folder holds none."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"setting 'model.path': {folder} holds no model configuration: {error}") from error
