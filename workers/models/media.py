"""Media and their placeholder tokens, checked against each other before a forward pass fails on them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from common.errors import Reject

_GRIDS = (("image", "image_grid_thw"), ("video", "video_grid_thw"))


def check_placeholders(config: PretrainedConfig, ids: np.ndarray[Any, Any], tensors: Mapping[str, Any]) -> None:
    """Raise `Reject` unless the prompt has one placeholder per merged patch: the sum of t * h * w / merge² of grids.

    `ids`: prompt tokens; `tensors`: processor outputs by name, of which the grids [media, 3] are read. Models whose
    features are not counted by grids are not checked.
    """
    settings: dict[str, Any] = config.to_dict()
    merge = (settings.get("vision_config") or {}).get("spatial_merge_size")
    if merge is None:
        return
    for kind, name in _GRIDS:
        token = settings.get(f"{kind}_token_id")
        if token is None:
            continue
        grid = np.asarray(tensors.get(name, np.zeros((0, 3), dtype=np.int64)))
        expected, found = int(grid.prod(axis=-1).sum()) // merge**2, int(np.count_nonzero(ids == token))
        if expected != found:
            raise Reject(f"{found} {kind} placeholders in the prompt, {expected} expected from {name} {grid.tolist()}")
