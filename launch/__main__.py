"""relaxq: start runs and look after them. `relaxq COMMAND --help` explains each command."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from common import logs
from common.errors import ConfigError
from common.process import Stop, run_main

Action: TypeAlias = Callable[[argparse.Namespace], int]


def up(args: argparse.Namespace) -> int:
    """Run a configuration on this machine, to its end."""
    from launch import plan, run  # noqa: PLC0415 - `--help` needs none of it

    logs.configure("launch", level="warning")
    made = plan.make(plan.read(_config_of(args), args.set), Path.cwd())
    return run.Head(made, Stop().install()).run()


def node(args: argparse.Namespace) -> int:
    """Do one node's part of a run in a SLURM job: `srun --ntasks-per-node=1` starts this on every node."""
    from launch import node as place  # noqa: PLC0415
    from launch import plan, slurm  # noqa: PLC0415

    logs.configure("launch")
    stop = Stop().install()
    job = slurm.read(os.environ)
    config = plan.read(_config_of(args), args.set)
    given = args.host or (config.broker.host if "host" in config.broker.model_fields_set else "")
    host = given or (slurm.head_address(job) if job.node == 0 else "")
    root = Path(args.root).absolute() if args.root else job.folder
    made = plan.make(config, root, run=job.run_of(config.name), nodes=job.nodes, host=host)
    return place.run(made, job.node, stop)


def submit(args: argparse.Namespace) -> int:
    """Submit a run to SLURM; it is the same job whatever the working folder is. Mistakes are found before."""
    from launch import plan, slurm  # noqa: PLC0415

    path = _config_of(args).resolve()
    config = plan.read(path, args.set)
    root = Path(args.root).resolve() if args.root else slurm.HOME
    plan.make(config, root, nodes=args.nodes)
    script = slurm.HOME / "launch" / f"{config.mode}.slurm"
    command = slurm.submission(script, path, Path(sys.executable), root, args.nodes, args.set, args.option)
    if args.dry_run:
        print(f"{shlex.join(command)}\n\n{script.read_text(encoding='utf-8')}", end="")
    else:
        print(slurm.run_command(command), end="")
    return 0


def show_plan(args: argparse.Namespace) -> int:
    """Print what `up` would start."""
    from launch import plan  # noqa: PLC0415

    made = plan.make(plan.read(_config_of(args), args.set), Path.cwd(), nodes=args.nodes)
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
    from brokers.keys import read_worker_key  # noqa: PLC0415

    key = read_worker_key(Path(args.key)) if args.key else None
    channel = DealerChannel(args.broker, "status", f"{os.getpid()}", key=key)
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

    def add(name: str, action: Action, words: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=action.__doc__)
        command.set_defaults(action=action)
        return command

    _settings(add("up", up, "run a configuration on this machine"))
    command = add("plan", show_plan, "print what `up` would start")
    _settings(command)
    command.add_argument("--nodes", type=int, default=1, help="lay out for so many nodes")
    command.add_argument("--json", action="store_true", help="the whole plan as JSON")
    command = add("slurm", submit, "submit a run to SLURM")
    _settings(command)
    command.add_argument("--nodes", type=int, default=3, help="one for brokers and trainer, the others generate")
    command.add_argument("--root", help="folder that runs/ is made in, shared by all nodes; default: the repository")
    command.add_argument(
        "--option", action="append", default=[], metavar="OPTION", help="of sbatch, as in --option=--partition=gpu"
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    command = add("node", node, "what the batch scripts start on every node of a SLURM job")
    _settings(command)
    command.add_argument("--root", help="folder that runs/ is made in, shared by all nodes; default: SLURM_SUBMIT_DIR")
    command.add_argument("--host", help="address of the first node that brokers bind; default: broker.host or NodeAddr")
    command = add("status", status, "print the state of a live run")
    command.add_argument("--broker", required=True, metavar="ADDRESS", help="the sample broker, tcp://HOST:PORT")
    command.add_argument("--key", metavar="FILE", help="keys/worker.key in the folder of an encrypted run")
    command.add_argument("--deadline", type=float, default=10.0, metavar="SECONDS", help="for the answer")
    add("doctor", doctor, "check this machine")
    return top


def _settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", help="TOML file, see configs/; default: the environment's CONFIG")
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting")


def _config_of(args: argparse.Namespace) -> Path:
    """Return the configuration's path; raises `ConfigError` when there is none."""
    path = args.config or os.environ.get("CONFIG")
    if not path:
        raise ConfigError("no configuration: name a file of configs/ on the command line, or in CONFIG")
    return Path(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and act; ends the process with the documented exit code."""
    args = parser().parse_args(argv)
    sys.path.insert(0, str(Path.cwd()))  # `module:Class` in a configuration may name a file that lies here
    run_main(lambda: args.action(args))


if __name__ == "__main__":
    main()
