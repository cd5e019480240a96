"""Engine `torch`: generation in this process with a transformers model, for CPUs, tests and single devices."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, PositiveInt

from common.group import PolicyVersion
from common.tensor import NamedTensor
from workers.rollout.engine import Completion, Request


class TorchEngine:
    """Continuous batching over one padded key-value cache; see `workers.rollout.decode`."""

    requires: ClassVar[frozenset[str]] = frozenset(
        {"prompt_ids", "tensor_name", "tensor_dtype", "tensor_shape", "tensor_per_token", "tensor_data"}
    )

    class Options(BaseModel):
        """`dtype` unset: float32 on a CPU, the checkpoint's own elsewhere. `threads` unset: torch's own choice."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        max_running_samples: PositiveInt = 256
        """samples decoded at once; a single group may exceed it"""
        prefill_tokens: PositiveInt = 16384
        """prompt tokens in one forward pass, pads included; a single prompt may exceed it"""
        device: str = "cpu"
        dtype: str | None = None
        threads: PositiveInt | None = None

    def __init__(self, options: Options, folder: Path, deterministic: bool) -> None:
        from workers.rollout.decode import Decoder  # noqa: PLC0415  (torch is imported when an engine is built)

        self._decoder = Decoder(
            folder,
            max_rows=options.max_running_samples,
            prefill_tokens=options.prefill_tokens,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            deterministic=deterministic,
        )

    @property
    def version(self) -> PolicyVersion:
        """See `Engine`, as for all methods."""
        return self._decoder.version

    @property
    def generated(self) -> int:  # noqa: D102
        return self._decoder.generated

    def room(self) -> int:  # noqa: D102
        return self._decoder.room()

    def running(self) -> Collection[str]:  # noqa: D102
        return self._decoder.running()

    def submit(self, request: Request) -> None:  # noqa: D102
        self._decoder.submit(request)

    def step(self, wait_seconds: float) -> list[Completion]:  # noqa: ARG002, D102  (a step computes, it never waits)
        return self._decoder.step()

    def interrupt(self) -> None:
        """A step never waits."""

    def abort(self, groups: Collection[str]) -> list[Completion]:  # noqa: D102
        return self._decoder.abort(groups)

    def load(self, version: PolicyVersion, tensors: Iterable[NamedTensor]) -> None:  # noqa: D102
        self._decoder.load(version, tensors)

    def sleep(self) -> None:  # noqa: D102
        self._decoder.sleep()

    def wake(self) -> None:  # noqa: D102
        self._decoder.wake()

    def close(self) -> None:
        """Forget the running groups and free what they hold."""
        self._decoder.close()
