"""Make the initial model of a run by its recipe: `python -m workers.prepare --plan FILE`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from common import logs
from common.config import from_json
from common.errors import ConfigError
from common.process import run_main
from workers import registry


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model into `model/` of the run's folder."""
    parser = argparse.ArgumentParser(prog="python -m workers.prepare", description=__doc__)
    parser.add_argument("--plan", required=True, metavar="FILE", help="plan.json of the run's folder")
    args = parser.parse_args(argv)
    logs.configure("prepare")
    try:
        plan = json.loads(Path(args.plan).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {args.plan}: {error}") from error
    config = from_json(json.dumps(plan["config"]))
    if config.model.recipe is not None:
        recipe = registry.create("model.recipe", config.model.recipe)
        source = registry.create("data", config.data, config.seed)
        recipe.make(Path(plan["folder"]) / "model", source, config.seed)


if __name__ == "__main__":
    run_main(main)
