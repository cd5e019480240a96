"""Start a reward worker: `python -m workers.reward --broker ADDRESS`."""

from collections.abc import Sequence

from common.process import run_main
from workers import stage
from workers.reward.stage import RewardStage
from workers.session import joined, parse

GROUPS_AT_ONCE = 32


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the reward queue until the run ends."""
    args = parse("reward", argv, __doc__ or "")
    with joined("reward", args) as session:
        pulse = session.client.channel.pulse
        rewards = RewardStage(session.config.reward, session.config.rewards, lambda n: pulse.report(samples=n))
        session.begin()
        try:
            stage.run("reward", rewards, session.client, lambda: session.over, GROUPS_AT_ONCE)
        finally:
            rewards.close()


if __name__ == "__main__":
    run_main(main)
