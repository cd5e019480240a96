"""Media and their placeholder tokens, checked against each other before a forward pass fails on them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from common.errors import Reject
from workers.processed import expected_placeholders

_KINDS = ("image", "video")


class Placeholders:
    """What a model's configuration says of placeholders; models whose features no grid counts are not checked."""

    def __init__(self, config: PretrainedConfig) -> None:
        settings: dict[str, Any] = config.to_dict()
        self._merge: int | None = (settings.get("vision_config") or {}).get("spatial_merge_size")
        self._tokens = {kind: settings[f"{kind}_token_id"] for kind in _KINDS if f"{kind}_token_id" in settings}

    def check(self, ids: np.ndarray[Any, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise `Reject` unless the prompt has a placeholder per merged patch: the sum of t * h * w / merge² of grids.

        `ids`: prompt tokens; `tensors`: processor outputs by name, of which the grids [media, 3] are read.
        """
        if self._merge is None:
            return
        for kind, token in self._tokens.items():
            name = f"{kind}_grid_thw"
            grid = tensors.get(name, np.zeros((0, 3), dtype=np.int64))
            expected, found = expected_placeholders(grid, self._merge), int(np.count_nonzero(ids == token))
            if expected != found:
                raise Reject(
                    f"{found} {kind} placeholders in the prompt, {expected} expected from {name} {grid.tolist()}"
                )
