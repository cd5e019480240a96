"""relaxq: start runs and look after them. `relaxq COMMAND --help` explains each command."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from common import logs
from common.process import Stop, run_main


def up(args: argparse.Namespace) -> int:
    """Run a configuration on this machine, to its end."""
    from launch import plan, run  # noqa: PLC0415 - `--help` needs none of it

    logs.configure("launch", level="warning")
    made = plan.make(plan.read(Path(args.config), args.set), Path.cwd())
    return run.Head(made, Stop().install()).run()


def show_plan(args: argparse.Namespace) -> int:
    """Print what `up` would start."""
    from launch import plan  # noqa: PLC0415

    made = plan.make(plan.read(Path(args.config), args.set), Path.cwd(), nodes=args.nodes)
    if args.json:
        print(made.to_json())
        return 0
    print(f"run {made.run} in {made.folder}")
    for stage in made.stages:
        print(f"  stage {stage.name:<10} requires {', '.join(sorted(stage.requires))}")
    for process in made.processes:
        print(f"  node {process.node}  {process.name:<13} {' '.join(process.command[1:])}")
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the state of a live run."""
    from brokers.client import SampleClient  # noqa: PLC0415
    from brokers.dealer import DealerChannel  # noqa: PLC0415

    channel = DealerChannel(args.broker, "status", f"{os.getpid()}")
    try:
        told = SampleClient(channel, "status").status(args.deadline)
    finally:
        channel.close(drain_seconds=0.0)
    print(json.dumps(told, indent=2))
    return 0


def doctor(_args: argparse.Namespace) -> int:
    """Check this machine, one line a finding, with the remedy."""
    from launch import doctor as checkup  # noqa: PLC0415

    return checkup.report(checkup.checks())


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(prog="relaxq", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, action, words in (
        ("up", up, "run a configuration on this machine"),
        ("plan", show_plan, "print what `up` would start"),
    ):
        command = commands.add_parser(name, help=words, description=action.__doc__)
        command.add_argument("config", help="TOML file, see configs/")
        command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting")
        command.set_defaults(action=action)
        if action is show_plan:
            command.add_argument("--nodes", type=int, default=1, help="lay out for so many nodes")
            command.add_argument("--json", action="store_true", help="the whole plan as JSON")
    command = commands.add_parser("status", help="print the state of a live run", description=status.__doc__)
    command.add_argument("--broker", required=True, metavar="ADDRESS", help="the sample broker, tcp://HOST:PORT")
    command.add_argument("--deadline", type=float, default=10.0, metavar="SECONDS", help="for the answer")
    command.set_defaults(action=status)
    command = commands.add_parser("doctor", help="check this machine", description=doctor.__doc__)
    command.set_defaults(action=doctor)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and act; ends the process with the documented exit code."""
    args = parser().parse_args(argv)
    run_main(lambda: args.action(args))


if __name__ == "__main__":
    main()
