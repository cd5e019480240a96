"""One end of a round trip through TransferQueue 0.1.11, in its own environment; see `tests/bench/trips.py`.

    PYTHON tests/bench/peers/transferqueue_side.py {serve|put|get} [--address RAY] [--units N]

`serve` starts Ray, the controller and the storage units, each a process of its own. Both ends use the key-value verbs
that its README recommends, in batches: one put and one get for all rows that share a batch size. Columns with rows of
one shape are one dense tensor, others are jagged nested ones, texts a `NonTensorStack`, so that nothing of the payload
but texts takes its slow path. Images are put once per prompt, under keys of their own, not once per sample.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a script finds only its own folder

from tests.bench.workloads import WORKLOADS, Column, same


def tensors(columns: dict[str, Column]) -> TensorDict:
    """Return the columns in the forms that TransferQueue sends without a copy where it can."""
    fields: dict[str, Any] = {}
    for name, rows in columns.items():
        if isinstance(rows[0], str):
            fields[name] = NonTensorStack(*rows)
        elif len({row.shape for row in rows}) == 1:
            fields[name] = torch.stack([torch.from_numpy(row.copy()) for row in rows])
        else:
            fields[name] = torch.nested.as_nested_tensor(
                [torch.from_numpy(row.copy()) for row in rows], layout=torch.jagged
            )
    return TensorDict(fields, batch_size=len(next(iter(columns.values()))))


def rows_of(values: Any) -> list[Any]:
    """Return a column as numpy arrays or texts."""
    if isinstance(values, torch.Tensor):
        return [row.numpy() for row in values.unbind()]
    return values.tolist() if hasattr(values, "tolist") else list(values)


class End:
    """Puts or gets whole batches."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._got: dict[str, TensorDict] = {}
        self._parts: dict[str, dict[str, Column]] = {}
        self._fields: dict[str, TensorDict] = {}
        self._workload, self._trip = "", 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one half of a round trip, or check what came out of the last one."""
        if "check" in request:
            found = {part: {name: rows_of(got[name]) for name in self._parts[part]} for part, got in self._got.items()}
            return {
                "equal": all(same(found[p][n], rows) for p, part in self._parts.items() for n, rows in part.items())
            }
        if request["workload"] != self._workload:
            self._prepare(request["workload"])
        return self._put() if self._kind == "put" else self._get()

    def _prepare(self, workload: str) -> None:
        self._workload, batch = workload, WORKLOADS[workload]()
        parts = {"samples": dict(batch.by_sample), "prompts": dict(batch.by_group)}
        self._parts = {name: columns for name, columns in parts.items() if columns}
        self._fields = {name: tensors(columns) for name, columns in self._parts.items()} if self._kind == "put" else {}

    def _keys(self, part: str) -> list[str]:
        rows = len(next(iter(self._parts[part].values())))
        return [f"{self._trip}-{part}-{row}" for row in range(rows)]

    def _put(self) -> dict[str, Any]:
        self._trip += 1
        keys = {part: self._keys(part) for part in self._parts}
        began = time.perf_counter()
        for part, fields in self._fields.items():
            tq.kv_batch_put(keys=keys[part], partition_id=self._workload, fields=fields)
        return {"seconds": time.perf_counter() - began}

    def _get(self) -> dict[str, Any]:
        self._trip += 1
        keys = {part: self._keys(part) for part in self._parts}
        self._got = {}
        began = time.perf_counter()
        for part, columns in self._parts.items():
            self._got[part] = tq.kv_batch_get(keys[part], self._workload, list(columns))
        seconds = time.perf_counter() - began
        for part in self._parts:
            tq.kv_clear(keys[part], self._workload)
        return {"seconds": seconds}


def main() -> None:
    """Serve one part of the system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["serve", "put", "get"])
    parser.add_argument("--address", help="of Ray, as `serve` told it")
    parser.add_argument("--units", type=int, default=1, help="storage units")
    parser.add_argument("--temporary", help="folder of Ray's own files; a short path")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.kind == "serve":
        # Actors ask Ray for a processor each, whether the machine has so many or not.
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        ray.init(num_cpus=8, _temp_dir=args.temporary, object_store_memory=256 << 20, **quiet)
        told = {"address": ray.get_runtime_context().gcs_address}
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": args.units}}}))
        end = None
    else:
        ray.init(address=args.address, log_to_driver=False, logging_level="error")
        tq.init()
        told, end = {}, End(args.kind)
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        print(json.dumps(end.answer(json.loads(line)) if end else {}), flush=True)
    if end is None:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
