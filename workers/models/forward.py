"""One forward pass over padded rows: log-prob of each response token and entropy of the distribution it came from.

Shapes: R rows, L padded length, T longest response, N response tokens, V vocabulary, H hidden size.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import ConfigError
from workers.models.batch import Array, Rows, TokenRules, pad_rows
from workers.models.load import media_token_ids, to_torch
from workers.rollout.engine import ProcessorTensor


def token_rules(model: PreTrainedModel) -> TokenRules:
    """Return what this model asks of token ids; raises `ConfigError` for a model without a language-model head."""
    if model.get_output_embeddings() is None:
        raise ConfigError(f"setting 'model': {type(model).__name__} has no output embeddings to read log-probs from")
    embedding: Any = model.get_input_embeddings()
    config: PretrainedConfig = model.config
    settings: dict[str, Any] = config.to_dict()
    settings |= settings.get("thinker_config") or {}
    found = {m: settings.get(f"{m}_token_id", settings.get(f"{m}_token_index")) for m in ("image", "video", "audio")}
    forbidden = media_token_ids(config)
    return TokenRules(
        vocabulary=int(embedding.weight.shape[0]),
        forbidden=forbidden,
        placeholders={modality: value for modality, value in found.items() if value is not None},
        merge=(settings.get("vision_config") or {}).get("spatial_merge_size") or 0,
        pad=next(i for i in range(len(forbidden) + 1) if i not in forbidden),
    )


def score(model: PreTrainedModel, rows: Rows, chosen: Array, rules: TokenRules) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the response tokens of the chosen rows: float32 [R, T], with gradient.

    Both belong to the distribution that was sampled from: logits divided by the sample's temperature (unscaled where it
    is 0), media ids excluded. Entropy in nats. Places behind the end of a response hold 0. The rows are of one kind.
    """
    device = model.device
    padded = pad_rows(rows, chosen, rules.pad)
    inside_RT = torch.from_numpy(padded.inside_RT).to(device)
    inputs: dict[str, Tensor] = {"input_ids": torch.from_numpy(padded.ids_RL)}
    tensors = rows.tensors_G[rows.group_S[chosen[0]]]
    if tensors:
        # Models that look both ways inside media, or count positions by the mask, must know where a row ends. Pure text
        # goes without: a mask would only cost the fused causal attention.
        inputs["attention_mask"] = torch.from_numpy(padded.present_RL.astype(np.int64))
        inputs |= {t.tensor.name: _media(rows, chosen, t, padded.ids_RL.shape[1]) for t in tensors if _is_ours(t)}
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    with _only_at(model, torch.from_numpy(padded.position_N).to(device)):
        logits_NV: Tensor = model(**on_device, use_cache=False).logits
    logprob_N, entropy_N = token_scores(
        logits_NV,
        torch.from_numpy(padded.target_N).to(device),
        torch.from_numpy(padded.temperature_N).to(device),
        rules.forbidden,
    )
    zeros_RT = torch.zeros(inside_RT.shape, dtype=logprob_N.dtype, device=device)
    return zeros_RT.masked_scatter(inside_RT, logprob_N), zeros_RT.masked_scatter(inside_RT, entropy_N)


def token_scores(
    logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor, forbidden: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return log-prob of each target and entropy [N] of softmax(logits / temperature) without the forbidden ids.

    At least float32 whatever the logits are. Differentiable once with respect to the logits; a token whose two incoming
    gradients are 0 hands on 0, also when its logits are NaN.
    """
    divisor_N = torch.where(temperature_N == 0, 1.0, temperature_N)
    return _TokenScores.apply(logits_NV, target_N, divisor_N, tuple(forbidden))  # pyright: ignore[reportReturnType]


class _TokenScores(torch.autograd.Function):
    """Keeps one [N, V] array between forward and backward, where the composed operations would keep five.

    With p the probabilities, t the target and H the entropy: d log p_t / d z = onehot(t) - p, and
    d H / d z = -p (log p + H), both divided by the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, divisor_N: Tensor, forbidden: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        scaled_NV = logits_NV.to(dtype) / divisor_N.to(dtype)[:, None]
        if forbidden:
            scaled_NV[:, list(forbidden)] = -torch.inf
        logp_NV = scaled_NV.log_softmax(-1)
        del scaled_NV
        # 0 * -inf is NaN: an excluded id adds nothing, by selection.
        entropy_N = -torch.where(logp_NV == -torch.inf, 0.0, logp_NV.exp() * logp_NV).sum(-1)
        ctx.save_for_backward(logp_NV, target_N, divisor_N, entropy_N)
        ctx.dtype = logits_NV.dtype
        return logp_NV.gather(1, target_N[:, None])[:, 0], entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the parameter's name
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logp_NV, target_N, divisor_N, entropy_N = ctx.saved_tensors
        by_logprob_N, by_entropy_N = grads
        surprise_NV = torch.where(logp_NV == -torch.inf, 0.0, logp_NV + entropy_N[:, None])
        grad_NV = logp_NV.exp() * -(by_logprob_N[:, None] + by_entropy_N[:, None] * surprise_NV)
        grad_NV.scatter_add_(1, target_N[:, None], by_logprob_N[:, None])
        counts_N = (by_logprob_N != 0) | (by_entropy_N != 0)
        grad_NV = torch.where(counts_N[:, None], grad_NV / divisor_N[:, None], 0.0)
        return grad_NV.to(ctx.dtype), None, None, None


@contextmanager
def _only_at(model: PreTrainedModel, position_N: Tensor) -> Generator[None]:
    """Let the head see the hidden states [N, H] of these places of the flattened [R, L] instead of all of them.

    `logits_to_keep` of transformers picks columns for all rows alike; responses start anywhere.
    """

    def gather(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (args[0].reshape(-1, args[0].shape[-1]).index_select(0, position_N),)

    head: Any = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def _is_ours(tensor: ProcessorTensor) -> bool:
    """The processor's own ids and mask cover the prompt alone; those of whole rows replace them."""
    return tensor.tensor.name not in {"input_ids", "attention_mask"}


def _media(rows: Rows, chosen: Array, like: ProcessorTensor, width: int) -> Tensor:
    """Return one processor tensor for all chosen rows.

    Per token: [R, ..., L], zeros over response and padding. Else: concatenated along the first axis, once per row,
    since the samples of a group share the media of their prompt.
    """
    groups, inverse_R = np.unique(rows.group_S[chosen], return_inverse=True)
    name = like.tensor.name
    each = [to_torch(next(t.tensor for t in rows.tensors_G[g] if t.tensor.name == name)) for g in groups]
    if not like.per_token:
        return torch.cat([each[i] for i in inverse_R])
    # A processor's leading axis of 1 is its batch of one prompt; the rows take its place.
    lead = (
        like.tensor.shape[1:-1]
        if like.tensor.shape[:1] == (1,) and len(like.tensor.shape) > 1
        else like.tensor.shape[:-1]
    )
    stacked = torch.stack(
        [torch.nn.functional.pad(t.reshape(*lead, t.shape[-1]), (0, width - t.shape[-1])) for t in each]
    )
    return stacked[torch.from_numpy(inverse_R)]
