"""Start a reference worker: `python -m workers.reference --broker ADDRESS`."""

from collections.abc import Sequence

from common.process import run_main
from workers import stage
from workers.reference.stage import ReferenceStage
from workers.session import joined, parse

GROUPS_AT_ONCE = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the reference queue until the run ends."""
    args = parse("reference", argv, __doc__ or "")
    with joined("reference", args) as session:
        reference = ReferenceStage(session.config, session.model_folder)
        session.begin()
        stage.run("reference", reference, session.client, lambda: session.over, GROUPS_AT_ONCE)


if __name__ == "__main__":
    run_main(main)
