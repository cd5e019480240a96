"""Start the trainer: `python -m workers.trainer --broker ADDRESS`."""

from collections.abc import Sequence

from common.errors import RelaxError
from common.process import run_main
from workers import registry
from workers.advantage.stage import AdvantageStage
from workers.reference.stage import ReferenceStage
from workers.session import Session, joined, parse
from workers.stage import Stage
from workers.trainer.algorithm import Algorithm


def inline_stages(session: Session, algorithm: Algorithm) -> list[tuple[str, Stage]]:
    """Return the stages that run inside the trainer in hybrid mode."""
    config = session.config
    if config.mode != "hybrid":
        return []
    stages: list[tuple[str, Stage]] = [("advantage", AdvantageStage(config))]
    if "ref_logprobs" in algorithm.loss_requires:
        stages.insert(0, ("reference", ReferenceStage(config, session.model_folder)))
    return stages


def main(argv: Sequence[str] | None = None) -> None:
    """Train until the run is finished; the run's end is this worker's to declare."""
    args = parse("trainer", argv, __doc__ or "")
    with joined("trainer", args) as session:
        from workers.trainer.loop import Trainer  # noqa: PLC0415 - torch, after the arguments are right
        from workers.trainer.report import RunReport  # noqa: PLC0415

        config = session.config
        algorithm: Algorithm = registry.create("algorithm", config.algorithm)
        backend = registry.create("backend", config.backend, session.model_folder, config.deterministic)
        backend.prepare_training(algorithm, config.steps)
        report = RunReport(session.folder)
        weights = session.weights("trainer")
        trainer = Trainer(config, backend, session.client, weights, report, inline_stages(session, algorithm))
        session.begin()
        try:
            state = trainer.run(lambda: session.over)
            if state == "finished":
                backend.save(session.folder / "checkpoint")
                session.client.end("finished")
        except RelaxError as error:
            session.client.end("failed", str(error))
            raise
        finally:
            report.close()


if __name__ == "__main__":
    run_main(main)
