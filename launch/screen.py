"""The pieces of the panel as pure functions: tables of queues and workers, counts, sparkline, numbers for people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
LABEL_COLUMNS = 10
NAME_COLUMNS = 12
SHOWN_ABOVE = frozenset({"step", "steps", "reward", "staleness_max", "samples_per_s", "heldout", "heldout_version"})
"""progress of the trainer that has a place of its own; `policy_version` is a column"""


def queue_table(queues: Mapping[str, Any]) -> Table:
    """Return a row per queue: groups that wait or are in work, groups to be had now, MiB, seconds, idle workers."""
    table = _table({"queue": NAME_COLUMNS, ">groups": 6, ">ready": 6, ">MiB": 7, ">oldest": 8, ">idle workers": 12})
    for name, queue in queues.items():
        oldest = f"{queue['oldest_s']:.1f} s" if queue["groups"] else ""
        numbers = [str(queue["groups"]), str(queue["ready"]), f"{queue['bytes'] / 2**20:.2f}"]
        table.add_row(name, *numbers, oldest, str(queue["waiting_workers"]), style="" if queue["groups"] else "dim")
    return table


def worker_table(workers: Sequence[Mapping[str, Any]], processes: Mapping[str, str], room: int, late: float) -> Table:
    """Return a row per worker or process, at most `room` rows. `late`: seconds of silence that are worth a colour.

    Those in trouble come first, processes that report nothing (the sample broker) last.
    """
    known = {worker["name"]: worker for worker in workers}
    rows = [(name, known.get(name), processes.get(name, "")) for name in dict.fromkeys([*processes, *known])]
    rows.sort(key=lambda row: 0 if _in_trouble(row[1], row[2]) else 1 if row[1] and row[1]["progress"] else 2)
    shown = rows if len(rows) <= room else rows[: room - 1]
    table = _table({"worker": NAME_COLUMNS, "role": 9, ">version": 7, ">seen": 8, "reports": 0})
    for name, worker, process in shown:
        if worker is None:
            table.add_row(name, "", "", "", line((process, "" if _is_fine(process) else "yellow")))
            continue
        version = "" if worker["version"] < 0 else str(worker["version"])
        is_late = worker["seen_s"] > late and not process.startswith("exited")
        seen = Text(f"{worker['seen_s']:.1f} s", "yellow" if is_late else "")
        table.add_row(name, worker["role"], version, seen, _words(worker, process))
    if hidden := rows[len(shown) :]:
        roles = Counter(worker["role"] if worker else "process" for _, worker, _ in hidden)
        words = [f"{n} {role}" for role, n in roles.items()] if len(hidden) > 4 else [name for name, _, _ in hidden]
        table.add_row(f"{len(hidden)} more", "", "", "", line((", ".join(words), "")), style="dim")
    return table


def count_lines(counts: Mapping[str, Any]) -> list[Text]:
    """Return how groups ended, how many leases expired and how many messages were refused, on one line.

    A second one says why groups were not trained and messages refused, if there are any.
    """
    refused: Mapping[str, int] = counts.get("refused", {})
    totals = {name: _total(counts.get(name, 0)) for name in ("started", "trained", "dropped", "dead", "expired")}
    text = line((f"{'groups':<{LABEL_COLUMNS}}", "dim"))
    for name, total in {**totals, "refused": _total(refused)}.items():
        is_alarm = total > 0 and name not in ("started", "trained")
        text.append(str(total), "bold yellow" if is_alarm else "bold").append(f" {name}  ")
    kinds = {"dropped": counts.get("dropped", {}), "dead": counts.get("dead", {}), "refused": refused}
    why = [f"{kind}: {reason} {n}" for kind, reasons in kinds.items() for reason, n in reasons.items()]
    return [text, line((" " * LABEL_COLUMNS + ", ".join(why), "yellow"))] if why else [text]


def stuck_words(stuck: Mapping[str, Any]) -> str:
    """Return in one line what does not get on, for how long, and why."""
    group = f" {stuck['group']}" if stuck["group"] else ""
    return f"stuck for {duration(stuck['seconds'])}: {stuck['stage']}{group}: {stuck['why']}"


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return the values as bars from the lowest to the highest; more values than columns are averaged in runs."""
    if not values:
        return ""
    columns = min(columns, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * columns
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def state_word(text: str) -> str:
    """Return a process's state without its countdown, which changes all the time: `restarts in 1.0 s`."""
    return text.split(" in ", 1)[0]


def finite(value: float | None) -> float | None:
    """Return the number, or None where there is none: a step may have no reward."""
    return value if value is not None and isfinite(value) else None


def number(value: float | None, digits: int) -> str:
    """Return a number with so many digits, or a dash."""
    return "–" if finite(value) is None else f"{value:.{digits}f}"


def line(*parts: tuple[str, str]) -> Text:
    """Return (text, style) pairs as one line that is cut rather than wrapped."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def label(text: str) -> Text:
    """Return the name of a value, in the width that all of them have."""
    return Text(f"{text:<{LABEL_COLUMNS}}", "dim", no_wrap=True)


def grid(*cells: RenderableType, ratio: tuple[int, ...]) -> Table:
    """Return cells side by side over the full width; those with a ratio share what is left."""
    table = Table.grid(expand=True)
    for share in ratio:
        table.add_column(ratio=share or None, no_wrap=True, vertical="middle")
    table.add_row(*cells)
    return table


def _table(columns: Mapping[str, int]) -> Table:
    """Return an empty table; each column is at least so wide, so that it stands still. `>`: to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, width in columns.items():
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">"), justify=justify, no_wrap=True, min_width=width)
    return table


def _in_trouble(worker: Mapping[str, Any] | None, process: str) -> bool:
    return not _is_fine(process) or bool(worker and worker["lost"])


def _is_fine(process: str) -> bool:
    return process in ("", "exited 0") or process.startswith("running")


def _words(worker: Mapping[str, Any], process: str) -> Text:
    """Return why a worker does not work, else what it reports: `generation_s` 0.5 reads "generation 0.5 s"."""
    if process == "exited 0" or not _is_fine(process):
        return line((process, "dim" if process == "exited 0" else "yellow"))
    if worker["lost"]:
        return line((f"lost: {worker['lost']}", "red"))
    words: list[str] = []
    for name, value in worker["progress"].items():
        if name in SHOWN_ABOVE or name == "policy_version" or value == "":
            continue
        shown = number(value, 2) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        words.append(f"{name[:-2]} {shown} s" if name.endswith("_s") else f"{name.replace('_', ' ')} {shown}")
    restarts = "" if process in ("", "running") else f"{process.removeprefix('running, ')}  "
    return line((restarts, "yellow"), (", ".join(words), ""))


def _total(count: int | Mapping[str, int]) -> int:
    return count if isinstance(count, int) else sum(count.values())
