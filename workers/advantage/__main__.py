"""Start an advantage worker: `python -m workers.advantage --broker ADDRESS`."""

from collections.abc import Sequence

from common.process import run_main
from workers import stage
from workers.advantage.stage import AdvantageStage
from workers.session import joined, parse

GROUPS_AT_ONCE = 32


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the advantage queue until the run ends."""
    args = parse("advantage", argv, __doc__ or "")
    with joined("advantage", args) as session:
        advantage = AdvantageStage(session.config)
        session.begin()
        stage.run("advantage", advantage, session.client, lambda: session.over, GROUPS_AT_ONCE)


if __name__ == "__main__":
    run_main(main)
