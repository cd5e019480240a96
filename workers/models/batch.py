"""Groups as checked, ragged rows, and some of those rows as padded arrays. A row is one sample behind its prompt.

Shapes: G groups, S samples of all groups, R rows of a micro-batch, L padded length, T longest response, N response
tokens of the micro-batch, U distinct prompts in it, P longest of them. The model is fed `prompt + response[:-1]`,
padded on the right: nothing is read off the last token of a response, and under a causal mask padding on the right is
never seen by a token that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from common.errors import Reject
from common.group import Group
from common.tensor import NamedTensor
from workers.processed import expected_placeholders, processor_tensors
from workers.rollout.engine import ProcessorTensor

Array: TypeAlias = np.ndarray[Any, Any]

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a model asks of token ids.

    `placeholders`: modality (image, video, audio) -> its placeholder id. `forbidden`: media ids that no response may
    hold. `merge`: patches per placeholder and spatial axis; 0 where grids do not decide. `pad`: an id without meaning.
    """

    vocabulary: int
    forbidden: tuple[int, ...]
    placeholders: Mapping[str, int]
    merge: int
    pad: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """Row i is `flat[start[i] : start[i] + length[i]]`."""

    flat: Array
    start: Array
    length: Array

    def take(self, rows: Array) -> Array:
        """Return the values of these rows, one row after the other."""
        length = self.length[rows]
        return self.flat[np.repeat(self.start[rows], length) + _ramp(length)]

    def padded(self, rows: Array, width: int, fill: Any) -> Array:
        """Return these rows as [len(rows), width], filled up on the right."""
        out = np.full((len(rows), width), fill, self.flat.dtype)
        out[np.arange(width) < self.length[rows][:, None]] = self.take(rows)
        return out


@dataclass(frozen=True, slots=True)
class Rows:
    """All samples of some groups.

    `length_S`: tokens that the model is fed per row, the prompt and all but the last token of the response. Rows of one
    `kind_S` carry the same set of processor tensors and may be stacked.
    """

    group_S: Array
    prompts: Ragged
    responses: Ragged
    temperature_S: Array
    length_S: Array
    kind_S: Array
    tensors_G: tuple[tuple[ProcessorTensor, ...], ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Response tokens of some rows: `inside_RT` marks them; its marks, row by row, are the N tokens."""

    inside_RT: Array
    target_N: Array
    temperature_N: Array


@dataclass(frozen=True, slots=True)
class Padded:
    """Whole rows. `position_N` points into the flattened [R, L], at the token before the one that is predicted."""

    ids_RL: Array
    present_RL: Array
    position_N: Array


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts, each once, and the responses behind them up to the last token but one of the longest; T1 = T - 1.

    `prompt_R`: row of [U, P] that a response continues. `position_N` points into the flattened [U, P] followed by the
    flattened [R, T1], at the token before the one that is predicted.
    """

    prompt_ids_UP: Array
    prompt_present_UP: Array
    prompt_R: Array
    response_ids_RT1: Array
    position_N: Array


def read_rows(groups: Sequence[Group], rules: TokenRules) -> Rows:
    """Read prompts, responses, temperatures and processor tensors of the groups.

    Raises `Reject`, naming group, sample and numbers, for a token id outside the vocabulary, a media id inside a
    response, an empty prompt, a wrong temperature, and for placeholders that do not match the media.
    """
    prompts, responses = ragged(groups, "prompt_ids"), ragged(groups, "response_ids")
    tensors_G = tuple(processor_tensors(group) for group in groups)
    group_S = _repeat_by_group(groups)
    for group, tensors in zip(groups, tensors_G, strict=True):
        _check_ids(group, rules)
        _check_media(group, tensors, rules)
    kinds: dict[Any, int] = {}
    kind_G = np.array([kinds.setdefault(_signature(tensors), len(kinds)) for tensors in tensors_G], np.int64)
    temperature_S = np.concatenate([_temperature(group) for group in groups])
    length_S = prompts.length[group_S] + np.maximum(responses.length, 1) - 1
    return Rows(group_S, prompts, responses, temperature_S, length_S, kind_G[group_S], tensors_G)


def ragged(groups: Sequence[Group], name: str) -> Ragged:
    """Return a list column of all groups; the rows follow each other group by group."""
    columns = [group.column(name) for group in groups]
    bounds = [column.offsets.to_numpy() for column in columns]
    flat = [column.values.to_numpy()[b[0] : b[-1]] for column, b in zip(columns, bounds, strict=True)]
    length = np.concatenate([np.diff(b) for b in bounds])
    return Ragged(np.concatenate(flat), np.cumsum(length) - length, length)


def ragged_like_tokens(groups: Sequence[Group], name: str) -> Ragged:
    """Return a per-token column; raises `Reject` unless each row is as long as its sample's `response_ids`."""
    for group in groups:
        tokens, values = (np.diff(group.column(c).offsets.to_numpy()) for c in ("response_ids", name))
        if len(tokens) != len(values):
            raise Reject(f"group {group.key.id}: {len(values)} rows of {name!r} for {len(tokens)} samples")
        wrong = np.flatnonzero(tokens != values)
        if wrong.size:
            i = wrong[0]
            raise Reject(
                f"group {group.key.id}, sample {i}: {values[i]} values of {name!r} for {tokens[i]} response tokens"
            )
    return ragged(groups, name)


def wanted(rows: Rows, chosen: Array) -> Wanted:
    """Return what the chosen rows ask of a forward pass."""
    response_R = rows.responses.length[chosen]
    return Wanted(
        inside_RT=np.arange(max(response_R.max(), 1)) < response_R[:, None],
        target_N=rows.responses.take(chosen).astype(np.int64),
        temperature_N=np.repeat(rows.temperature_S[chosen], response_R),
    )


def pad_rows(rows: Rows, chosen: Array, pad: int) -> Padded:
    """Return the chosen rows padded to their longest. `pad`: id that fills up."""
    prompt_R, response_R = rows.prompts.length[rows.group_S[chosen]], rows.responses.length[chosen]
    length_R = rows.length_S[chosen]
    column_L = np.arange(length_R.max())
    present_RL = column_L < length_R[:, None]
    in_prompt_RL = column_L < prompt_R[:, None]
    ramp_N, row_N = _ramp(response_R), np.repeat(np.arange(len(chosen)), response_R)
    ids_RL = np.full(present_RL.shape, pad, np.int64)
    ids_RL[in_prompt_RL] = rows.prompts.take(rows.group_S[chosen])
    ids_RL[present_RL & ~in_prompt_RL] = rows.responses.take(chosen)[ramp_N < response_R[row_N] - 1]
    return Padded(ids_RL, present_RL, row_N * len(column_L) + prompt_R[row_N] - 1 + ramp_N)


def split_rows(rows: Rows, chosen: Array, pad: int) -> Split:
    """Return the chosen rows with each prompt once. `pad`: id that fills up."""
    group_U, prompt_R = np.unique(rows.group_S[chosen], return_inverse=True)
    prompt_U, response_R = rows.prompts.length[group_U], rows.responses.length[chosen]
    width, rest = int(prompt_U.max()), max(int(response_R.max()) - 1, 0)
    ramp_N, row_N = _ramp(response_R), np.repeat(np.arange(len(chosen)), response_R)
    return Split(
        prompt_ids_UP=rows.prompts.padded(group_U, width, pad).astype(np.int64),
        prompt_present_UP=np.arange(width) < prompt_U[:, None],
        prompt_R=prompt_R,
        response_ids_RT1=rows.responses.padded(chosen, rest + 1, pad)[:, :rest].astype(np.int64),
        position_N=np.where(
            ramp_N == 0,
            prompt_R[row_N] * width + prompt_U[prompt_R[row_N]] - 1,
            len(group_U) * width + row_N * rest + ramp_N - 1,
        ),
    )


def _ramp(length: Array) -> Array:
    """0, 1 .. length[0] - 1, 0, 1 .. length[1] - 1 and so on."""
    return np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)


def _repeat_by_group(groups: Sequence[Group]) -> Array:
    return np.repeat(np.arange(len(groups)), [len(group.column("response_ids")) for group in groups])


def _temperature(group: Group) -> Array:
    values = group.numpy("temperature")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise Reject(f"group {group.key.id}, sample {wrong[0]}: temperature {values[wrong[0]]}")
    return values


def _signature(tensors: tuple[ProcessorTensor, ...]) -> Any:
    """What must agree for tensors to be concatenated along the first axis, or stacked per row."""
    return frozenset(
        (t.tensor.name, t.tensor.dtype, t.per_token, t.tensor.shape[:-1] if t.per_token else t.tensor.shape[1:])
        for t in tensors
    )


def _check_ids(group: Group, rules: TokenRules) -> None:
    prompt, name = group.arrays("prompt_ids")[0], group.key.id
    if not len(prompt):
        raise Reject(f"group {name}: the prompt has no token")
    wrong = np.flatnonzero((prompt < 0) | (prompt >= rules.vocabulary))
    if wrong.size:
        raise Reject(f"group {name}: prompt token {wrong[0]} is {prompt[wrong[0]]}, vocabulary {rules.vocabulary}")
    column = group.column("response_ids")
    offsets, ids = column.offsets.to_numpy(), column.values.to_numpy()
    for flaw, bad in (
        (f"outside the vocabulary of {rules.vocabulary}", (ids < 0) | (ids >= rules.vocabulary)),
        ("a media token, which no policy may sample", np.isin(ids, rules.forbidden)),
    ):
        wrong = np.flatnonzero(bad)
        if wrong.size:
            sample = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            place = wrong[0] - offsets[sample]
            raise Reject(f"group {name}, sample {sample}: response token {place} is {ids[wrong[0]]}, {flaw}")


def _check_media(group: Group, tensors: tuple[ProcessorTensor, ...], rules: TokenRules) -> None:
    prompt, name = group.arrays("prompt_ids")[0], group.key.id
    by_name = {t.tensor.name: t.tensor for t in tensors}
    for t in tensors:
        if not t.tensor.shape or (t.per_token and t.tensor.shape[-1] != len(prompt)):
            raise Reject(f"group {name}: tensor {t.tensor.name!r} of shape {t.tensor.shape}, prompt of {len(prompt)}")
    for modality, placeholder in rules.placeholders.items():
        found = int((prompt == placeholder).sum())
        pixels = _PIXELS.get(modality) if rules.merge else None
        if found and (pixels not in by_name if pixels else all(t.per_token for t in tensors)):
            raise Reject(f"group {name}: {found} {modality} placeholder tokens but no {pixels or 'media tensors'}")
        if pixels:
            _check_grid(name, modality, found, by_name, rules.merge)
    _check_runs(group, prompt, rules)


def _check_grid(name: str, modality: str, found: int, by_name: Mapping[str, NamedTensor], merge: int) -> None:
    grid, pixels = by_name.get(f"{modality}_grid_thw"), by_name.get(_PIXELS[modality])
    expected = expected_placeholders(grid.numpy() if grid else [], merge)
    if found != expected:
        raise Reject(f"group {name}: {found} {modality} placeholder tokens, the grids ask for {expected}")
    patches = found * merge**2
    if pixels is not None and pixels.shape[0] != patches:
        raise Reject(f"group {name}: {pixels.shape[0]} rows of {_PIXELS[modality]}, the grids ask for {patches}")


def _check_runs(group: Group, prompt: Array, rules: TokenRules) -> None:
    """Each placeholder token lies in a run that the processor announced; a run may hold marks and time stamps too."""
    start, length = group.arrays("placeholder_start")[0], group.arrays("placeholder_length")[0]
    covered = np.zeros(len(prompt), bool)
    for first, count in zip(start, length, strict=True):
        if first < 0 or count < 1 or first + count > len(prompt):
            raise Reject(f"group {group.key.id}: media run {first}+{count} leaves the prompt of {len(prompt)} tokens")
        covered[first : first + count] = True
    stray = np.flatnonzero(np.isin(prompt, list(rules.placeholders.values())) & ~covered)
    if stray.size:
        raise Reject(
            f"group {group.key.id}: {stray.size} placeholder tokens lie outside the {len(start)} media runs, "
            f"the first at {stray[0]}"
        )
