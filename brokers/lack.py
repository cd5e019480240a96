"""What a stage lacks, in words: a worker, a version, prompts, credit or the turn."""

from collections.abc import Iterable

from brokers.ledger import Ledger
from brokers.record import ROLLOUT, TRAINER
from brokers.roster import Member
from brokers.turn import Turn
from common.group import PolicyVersion

NAMED = 3
"""workers that are named; the others are counted"""


def of_workers(version: PolicyVersion, serving: Iterable[Member], members: Iterable[Member]) -> str:
    """Say why nobody has a group of a stage in work although there are some to be had.

    `version`: the trainer's; `serving`: those of the members that belong to the stage.
    """
    there = list(serving)
    if not there:
        return "no worker serves it"
    late = [member for member in there if 0 <= member.version < version]
    if late:
        weights = [member.name for member in members if member.role == "weights"]
        source = f"{_names(weights)} serves them" if weights else "no weight broker is here"
        return f"{_names(m.name for m in late)} is at version {late[0].version} and waits for {version}: {source}"
    return f"{_names(m.name for m in there)} is heard and asks for none"


def of_groups(ledger: Ledger, turn: Turn, members: Iterable[Member]) -> tuple[str, str, str]:
    """Return (stage, group, why) of the stage nearest before the trainer that has groups, or else of rollout."""
    books = ledger.books
    required, passed = set(books.stages[TRAINER].requires), {TRAINER}
    while level := [s for s in books.stages.values() if s.adds & required and s.name not in passed]:
        for stage in level:
            queue = books.queues[stage.name]
            if stage.name != ROLLOUT and queue.groups:
                group = next(iter(queue.entered))
                return stage.name, group, f"{queue.groups} groups are there, {queue.groups - queue.ready} in work"
        passed |= {stage.name for stage in level}
        required = {name for stage in level for name in stage.requires}
    queue = books.queues[ROLLOUT]
    group = next(iter(queue.entered), "")
    if turn.side == TRAINER:
        return (
            ROLLOUT,
            group,
            f"rollout waits for the turn, which {_names(turn.holders) or 'nobody'} of the trainer has",
        )
    if queue.groups:
        return ROLLOUT, group, f"rollout waits for credit: {ledger.window.outstanding} groups are started and untrained"
    if ledger.data_ended:
        return ROLLOUT, "", "there are no more prompts"
    feeding = [member.name for member in members if member.role == "prompt"]
    source = f"{_names(feeding)} is heard and adds none" if feeding else "no prompt worker is here"
    return ROLLOUT, "", f"rollout waits for prompts: {source}"


def _names(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + more
