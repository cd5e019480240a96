"""Start the prompt worker: `python -m workers.prompt --broker ADDRESS`."""

from collections.abc import Sequence

from common.process import run_main
from workers import registry
from workers.session import joined, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Feed prompts until the run ends."""
    args = parse("prompt", argv, __doc__ or "")
    with joined("prompt", args) as session:
        from workers.prompt.encode import PromptEncoder  # noqa: PLC0415 - transformers, after the arguments are right
        from workers.prompt.feed import Feed  # noqa: PLC0415

        config = session.config
        source = registry.create("data", config.data, config.seed)
        encoder = PromptEncoder(session.model_folder, config.data.name)
        feed = Feed(config, source, encoder, session.client, session.stop)
        session.begin()
        while not session.over:
            feed.turn()


if __name__ == "__main__":
    run_main(main)
