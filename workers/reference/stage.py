"""The reference stage: log-probs of response tokens under frozen weights, by the training backend's own forward."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from common.group import Group, concatenate
from common.section import Section, encode
from common.settings import Config
from workers import registry
from workers.trainer.backend import Backend


class ReferenceStage:
    """Holds the weights of `folder`, which never change."""

    requires: ClassVar[frozenset[str]] = frozenset(
        {"prompt_ids", "response_ids", "temperature"}
    )  # and what the backend reads; see wiring
    adds: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})

    def __init__(self, config: Config, folder: Path) -> None:
        self._backend: Backend = registry.create("backend", config.backend, folder, config.deterministic)

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        """Return one `reference` section per group."""
        scored = self._backend.logprobs(groups)
        return [encode("reference", {"ref_logprobs": concatenate(samples, "float32")}) for samples in scored]
