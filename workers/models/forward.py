"""Forward passes over rows: log-prob of each response token and entropy of the distribution it came from.

Shapes: R rows, L padded length, T longest response and T1 one less, N response tokens, U distinct prompts, P longest
prompt, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from common.errors import ConfigError
from workers.models.batch import Array, Rows, TokenRules, pad_rows, split_rows, wanted
from workers.models.caches import Continuation
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


class Scorer:
    """Scores rows with one model. `rules` are the model's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rules = token_rules(model)
        self._model = model
        self._can_split = _attends_to_all(model)
        self._continuation = Continuation(model)

    def score(self, rows: Rows, chosen: Array) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the response tokens of the chosen rows: float32 [R, T], with gradient.

        Both belong to the distribution that was sampled from: logits divided by the sample's temperature (unscaled
        where it is 0), media ids excluded. Entropy in nats. Places behind the end of a response hold 0. The rows are of
        one kind.
        """
        want = wanted(rows, chosen)
        inside_RT = self._tensor(want.inside_RT)
        is_split = self._can_split and _split_pays(rows, chosen)
        logits_NV = self._split_logits(rows, chosen) if is_split else self._whole_logits(rows, chosen)
        logprob_N, entropy_N = token_scores(
            logits_NV, self._tensor(want.target_N), self._tensor(want.temperature_N), self.rules.forbidden
        )
        zeros_RT = torch.zeros(inside_RT.shape, dtype=logprob_N.dtype, device=logprob_N.device)
        return zeros_RT.masked_scatter(inside_RT, logprob_N), zeros_RT.masked_scatter(inside_RT, entropy_N)

    def _whole_logits(self, rows: Rows, chosen: Array) -> Tensor:
        """Logits [N, V] from one pass over whole rows."""
        padded = pad_rows(rows, chosen, self.rules.pad)
        inputs = self._inputs(rows, rows.group_S[chosen], padded.ids_RL, padded.present_RL)
        with _head_sees(self._model, _Picker(self._tensor(padded.position_N))):
            return self._model(**inputs, use_cache=False).logits

    def _split_logits(self, rows: Rows, chosen: Array) -> Tensor:
        """Logits [N, V] from a pass over prompts, each once, and one over the responses behind their keys and values.

        The samples of a group share their prompt and its media, which are then computed once instead of once per
        sample, backward pass included; the gradient of a prompt is the sum over its samples either way.
        """
        split = split_rows(rows, chosen, self.rules.pad)
        inputs = self._inputs(rows, np.unique(rows.group_S[chosen]), split.prompt_ids_UP, split.prompt_present_UP)
        picker = _Picker(self._tensor(split.position_N))
        if not split.response_ids_RT1.size:
            with _head_sees(self._model, picker):
                return self._model(**inputs, use_cache=False).logits
        cache = DynamicCache()
        self._continuation.forget()
        with _head_sees(self._model, picker.keep):
            self._model(**inputs, **self._continuation.using(cache))
        prompt_R, present_UP = self._tensor(split.prompt_R), self._tensor(split.prompt_present_UP)
        next_U = present_UP.sum(1) + self._continuation.delta(len(present_UP), present_UP.device)
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys, layer.values = layer.keys.index_select(0, prompt_R), layer.values.index_select(0, prompt_R)
        ids_RT1 = self._tensor(split.response_ids_RT1)
        position_RT1 = next_U[prompt_R][:, None] + torch.arange(ids_RT1.shape[1], device=ids_RT1.device)
        with _head_sees(self._model, picker):
            return self._model(
                input_ids=ids_RT1,
                attention_mask=torch.cat([present_UP[prompt_R], torch.ones_like(ids_RT1, dtype=torch.bool)], 1),
                position_ids=self._continuation.positions(position_RT1),
                **self._continuation.using(cache),
            ).logits

    def _inputs(self, rows: Rows, groups: Array, ids: Array, present: Array) -> dict[str, Tensor]:
        """Keywords of the forward pass; row i belongs to `groups[i]`."""
        inputs = {"input_ids": self._tensor(ids)}
        tensors = rows.tensors_G[groups[0]]
        if tensors:
            # Models that look both ways inside media, or count positions by the mask, must know where a row ends. Pure
            # text goes without: a mask would only cost the fused causal attention.
            inputs["attention_mask"] = self._tensor(present.astype(np.int64))
        for tensor in tensors:
            # The processor's own ids and mask cover the prompt alone; those of whole rows replace them.
            if tensor.tensor.name not in {"input_ids", "attention_mask"}:
                inputs[tensor.tensor.name] = _media(rows, groups, tensor, ids.shape[1]).to(self._model.device)
        return inputs

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


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


class _Picker:
    """Picks the hidden states [N, H] that the head is to see out of all of them, also over two passes.

    `logits_to_keep` of transformers picks columns for all rows alike; responses start anywhere.
    """

    def __init__(self, position_N: Tensor) -> None:
        self._position_N = position_N
        self._kept: list[Tensor] = []

    def keep(self, _head: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Keep these states for the next pass; the head sees none."""
        self._kept.append(_flat(args[0]))
        return (self._kept[-1][:0],)

    def __call__(self, _head: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        states = torch.cat([*self._kept, _flat(args[0])]) if self._kept else _flat(args[0])
        return (states.index_select(0, self._position_N),)


@contextmanager
def _head_sees(model: PreTrainedModel, hook: Callable[..., tuple[Tensor]]) -> Generator[None]:
    head: Any = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _flat(states: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1])


def _attends_to_all(model: PreTrainedModel) -> bool:
    """Whether keys and values can stand for a prompt: each layer attends to all tokens before, none keeps a state.

    In a window, distances would count the padding between prompt and response.
    """
    text: dict[str, Any] = model.config.get_text_config().to_dict()
    untyped: Any = model
    kinds = text.get("layer_types")
    if kinds:
        return set(kinds) == {"full_attention"}
    return not (untyped._is_stateful or text.get("sliding_window"))


def _split_pays(rows: Rows, chosen: Array) -> bool:
    """Whether prompts fed once halve the padded tokens; below that, one pass of fused causal attention is no slower."""
    groups = np.unique(rows.group_S[chosen])
    num_responses = len(chosen) * max(int(rows.responses.length[chosen].max()) - 1, 0)
    split = len(groups) * int(rows.prompts.length[groups].max()) + num_responses
    return 2 * split <= len(chosen) * int(rows.length_S[chosen].max())


def _media(rows: Rows, group_R: Array, like: ProcessorTensor, width: int) -> Tensor:
    """Return one processor tensor for rows of these groups.

    Per token: [R, ..., L], zeros over response and padding. Else: concatenated along the first axis, once per row,
    since the samples of a group share the media of their prompt.
    """
    groups, inverse_R = np.unique(group_R, return_inverse=True)
    name, shape = like.tensor.name, like.tensor.shape
    each = [to_torch(next(t.tensor for t in rows.tensors_G[g] if t.tensor.name == name)) for g in groups]
    if not like.per_token:
        return torch.cat([each[i] for i in inverse_R])
    # A processor's leading axis of 1 is its batch of one prompt; the rows take its place.
    lead = shape[1:-1] if len(shape) > 1 and shape[0] == 1 else shape[:-1]
    padded = [torch.nn.functional.pad(t.reshape(*lead, t.shape[-1]), (0, width - t.shape[-1])) for t in each]
    return torch.stack(padded)[torch.from_numpy(inverse_R)]
