"""The decode loop of engine `torch`: admit, feed, draw, harvest.

Shapes: R rows (running samples), T tokens, V vocabulary.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.errors import Reject, WorkerError
from common.group import PolicyVersion
from common.tensor import NamedTensor
from workers.models.load import load_model
from workers.models.media import Placeholders
from workers.models.weights import replace_weights
from workers.rollout.admission import Running, Start, batches, check_request
from workers.rollout.engine import Completion, FinishReason, Request
from workers.rollout.kinds import Kinds
from workers.rollout.kv import RowCache
from workers.rollout.network import Network
from workers.rollout.rows import Rows
from workers.rollout.sample import draw, uniform


class Decoder:
    """Rows of all groups decode together; in deterministic mode those of one group at a time.

    A prompt is prefilled once and its keys and values are copied to the group's rows. Finished rows leave at once and
    the rows of waiting groups take their place.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_rows: int,
        prefill_tokens: int,
        device: str,
        dtype: str | None,
        threads: int | None,
        deterministic: bool,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic and torch.device(device).type != "cpu":
            # On CUDA, cuBLAS also wants CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts; torch says so.
            torch.use_deterministic_algorithms(True)
        self.version: PolicyVersion = 0
        self.generated = 0  # tokens, ever
        self._network = Network(load_model(folder, dtype=dtype, device=device))
        self._placeholders = Placeholders(self._network.model.config)
        self._home = self._network.device
        self._max_rows, self._prefill_tokens, self._deterministic = max_rows, prefill_tokens, deterministic
        self._groups: dict[str, Running] = {}
        self._by_key: dict[int, Running] = {}
        self._waiting: list[Running] = []
        self._next_key, self._group_size = 0, max_rows
        self._rows: Rows | None = None
        self._cache = RowCache(max_rows)
        self._kinds = Kinds(self._network.vocabulary, self._home)

    def room(self) -> int:
        """Groups as large as the last one that would run now; one at least when nothing runs, whatever its size."""
        idle = not self._groups
        if self._deterministic:
            return int(idle)
        taken = self._num_rows + sum(running.num_open for running in self._waiting)
        return max(int(idle), max(0, self._max_rows - taken) // self._group_size)

    def running(self) -> Collection[str]:
        """Groups that are neither finished nor aborted."""
        return tuple(self._groups)

    def submit(self, request: Request) -> None:
        """Queue a group; the next step admits it if rows are free. Raises `Reject` as `Engine` says."""
        if request.group in self._groups:
            raise Reject(f"group {request.group} is running already")
        limits = check_request(request, self._network.vocabulary, self._network.context)
        grids = {part.tensor.name: part.tensor.numpy() for part in request.tensors if part.tensor.name.endswith("_thw")}
        self._placeholders.check(request.prompt_ids, grids)
        running = Running(self._next_key, request, self.version, limits)
        self._groups[request.group] = self._by_key[running.key] = running
        self._waiting.append(running)
        self._next_key, self._group_size = self._next_key + 1, len(request.seeds)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, then decode one token of every row; return the groups that finished."""
        self._admit()
        rows = self._rows
        if rows is not None:
            self._cache.make_room()
            logits_RV = self._network.decode(rows.token_R, rows.position_R, self._cache.cache, self._cache.mask())
            self._cache.advance()
            rows.position_R = rows.position_R + 1
            self._draw(rows, logits_RV)
            self._harvest(rows)
        return self._taken([running for running in self._groups.values() if not running.num_open])

    @torch.inference_mode()
    def abort(self, groups: Collection[str]) -> list[Completion]:
        """End these groups with what they have; those that do not run are passed over."""
        ending = [running for name, running in self._groups.items() if name in groups]
        if self._rows is not None:
            keys = torch.tensor([running.key for running in ending], device=self._home)
            self._end(self._rows, torch.isin(self._rows.group_R, keys), None)
        self._waiting = [running for running in self._waiting if running not in ending]
        for running in ending:
            running.end_waiting()
        return self._taken(ending)

    def load(self, version: PolicyVersion, tensors: Iterable[NamedTensor]) -> None:
        """Replace all weights; keys and values of running rows stay as the old weights made them."""
        replace_weights(self._network.model, tensors)
        self.version = version

    def sleep(self) -> None:
        """Free device memory; the weights wait in host memory."""
        assert not self._groups, "an engine sleeps when nothing runs"
        self._cache.clear()
        if self._home.type != "cpu":
            torch.nn.Module.to(self._network.model, "cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring the weights back."""
        torch.nn.Module.to(self._network.model, self._home)

    def close(self) -> None:
        """Drop the groups and their memory."""
        for groups in (self._groups, self._by_key, self._waiting):
            groups.clear()
        self._rows = None
        self._cache.clear()

    @property
    def _num_rows(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def _admit(self) -> None:
        """Prefill the waiting groups that fit and draw their first tokens; a group larger than that runs alone."""
        admitted: list[Running] = []
        rows = self._num_rows
        while self._waiting:
            is_idle = not rows and not admitted
            fits = not self._deterministic and rows + self._waiting[0].num_open <= self._max_rows
            if not (is_idle or fits):
                break
            admitted.append(self._waiting.pop(0))
            rows += admitted[-1].num_open
        starts = [start for running in admitted for start in running.starts()]
        for batch in batches(starts, self._prefill_tokens):
            self._begin(batch)

    def _begin(self, starts: Sequence[Start]) -> None:
        prefilled = self._network.prefill([start.prompt for start in starts])
        source = [i for i, start in enumerate(starts) for _ in start.samples]
        source_R = torch.tensor(source, device=self._home)
        rows = Rows.begin(starts, [self._kinds.number(start.running.request.sampling) for start in starts], self._home)
        rows.position_R = (prefilled.length_I + prefilled.delta_I)[source_R]
        self._draw(rows, prefilled.logits_IV[source_R])
        ahead = max(max(start.running.limits) for start in starts)
        self._cache.insert(prefilled.cache, source_R, prefilled.length_I[source_R], ahead)
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.append(rows)
        self._harvest(self._rows)

    def _draw(self, rows: Rows, logits_RV: Tensor) -> None:
        forbidden_RV = self._kinds.forbidden(rows.kind_R)
        uniform_R = uniform(rows.seed_R, rows.count_R)
        token_R, logprob_R = draw(logits_RV, uniform_R, rows.temperature_R, forbidden_RV)
        if not bool(logprob_R.isfinite().all()):
            raise WorkerError(
                f"engine 'torch': logits of version {self.version} are not finite, or all ids are forbidden"
            )
        rows.record(token_R, logprob_R, self.version)
        self.generated += len(rows)

    def _harvest(self, rows: Rows) -> None:
        """End the rows whose last token was a stop id or reached the limit."""
        stop_R = self._kinds.stops(rows.kind_R, rows.token_R)
        self._end(rows, stop_R | (rows.count_R >= rows.limit_R), stop_R)

    def _end(self, rows: Rows, end_R: Tensor, stop_R: Tensor | None) -> None:
        """Take rows out, as finished where `stop_R` says why, else as aborted; the last rows fill the gaps."""
        index_R = end_R.nonzero()[:, 0]
        if not len(index_R):
            return
        reasons: list[FinishReason] = ["abort"] * len(index_R)
        if stop_R is not None:
            reasons = ["stop" if is_stop else "length" for is_stop in stop_R[index_R].tolist()]
        for key, sample, generation in rows.generations(index_R, reasons):
            self._by_key[key].done[sample] = generation
        remain = len(rows) - len(index_R)
        into_R = index_R[index_R < remain]
        from_R = (~end_R[remain:]).nonzero()[:, 0] + remain
        rows.keep(into_R, from_R, remain)
        self._cache.keep(into_R, from_R, remain)
        if not remain:
            self._rows = None
            if self._deterministic:
                # Memory that an earlier group shaped would show in strides, and strides may choose another kernel.
                self._cache.clear()

    def _taken(self, finished: Sequence[Running]) -> list[Completion]:
        for running in finished:
            del self._groups[running.request.group], self._by_key[running.key]
        return [running.completion() for running in finished]
