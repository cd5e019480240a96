"""What the sample broker costs, beside what the machine could do and what TransferQueue 0.1.11 does, in one run.

    python tests/bench/broker.py [--peers PYTHON] [--json FILE] [--quick]

`--peers` is the Python of an environment with `tests/bench/peers/transferqueue.txt`; without it nobody is compared with
TransferQueue. See `trips` for round trips, `headers` for leases and acknowledgements, `media` for images. Ratios are
what counts: times are those of this machine, now. A value is the best of several repetitions; `spread` says how much
worse their median was.
"""

import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script finds only its own folder

from common import logs  # noqa: E402
from tests.bench import headers, media, table, trips  # noqa: E402

ROUNDS, QUICK_ROUNDS = 15, 1
DEPTHS, QUICK_DEPTHS = (1_000, 100_000, 1_000_000), (1_000, 5_000)
WORKERS, QUICK_WORKERS = (1, 100, 1_000), (1, 20)
BURSTS, QUICK_BURSTS = 6, 2


def recovered(home: Path, gigabytes: float, events: int) -> list[table.Row]:
    """Return how soon a killed broker is back, where `recovery` can tell."""
    if importlib.util.find_spec("tests.bench.recovery") is None:
        return []
    return importlib.import_module("tests.bench.recovery").recovery(gigabytes, events, home)


def main() -> None:
    """Measure everything."""
    parser = table.parser(__doc__)
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="of an environment with TransferQueue")
    parser.add_argument("--units", type=int, default=1, help="storage units of TransferQueue; 1 is its best on a host")
    parser.add_argument("--quick", action="store_true", help="less of everything, in less than a minute: no figures")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="that a broker has journaled when it is killed")
    args = parser.parse_args()
    logs.configure("bench", level="warning")
    rounds, bursts = (QUICK_ROUNDS, QUICK_BURSTS) if args.quick else (ROUNDS, BURSTS)
    depths, workers = (QUICK_DEPTHS, QUICK_WORKERS) if args.quick else (DEPTHS, WORKERS)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relaxq-bench-")))
        rows = headers.rows(home, depths, workers, bursts)  # before Ray, which is never quite idle
        rows += media.rows(home / "media", trips.tcp())
        peer = trips.TransferQueue(args.peers, home, args.units) if args.peers else None
        if peer is not None:
            stack.callback(peer.close)
        rows += trips.rows(home, peer, rounds)
        rows += recovered(home, *((0.05, 2_000) if args.quick else (args.gigabytes, 100_000)))
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    table.report(rows, args.json)


if __name__ == "__main__":
    main()
