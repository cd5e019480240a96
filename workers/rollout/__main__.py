"""Start a rollout worker: `python -m workers.rollout --broker ADDRESS`, from any node, at any time."""

from collections.abc import Sequence

from common.process import run_main
from workers import registry
from workers.session import joined, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Generate until the run ends or this worker is told to stop."""
    args = parse("rollout", argv, __doc__ or "")
    with joined("rollout", args) as session:
        from brokers.weight_client import Follower  # noqa: PLC0415
        from workers.models.load import decoder, load_config, media_token_ids, stop_ids  # noqa: PLC0415
        from workers.rollout.loop import Rollout  # noqa: PLC0415

        config, folder = session.config, session.model_folder
        engine = registry.create("engine", config.engine, folder, config.deterministic)
        follower = Follower(session.weights("rollout"), engine.version, on_reply=engine.interrupt)
        forbidden = media_token_ids(load_config(folder))
        rollout = Rollout(config, engine, session.client, follower, decoder(folder), stop_ids(folder), forbidden)
        session.begin()
        try:
            rollout.run(lambda: session.over)
        finally:
            engine.close()


if __name__ == "__main__":
    run_main(main)
