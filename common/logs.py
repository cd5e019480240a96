"""Structured logs: one line an event, role and rank bound once, to a person on a terminal or as JSON to a file."""

import logging
import sys

import structlog


def configure(role: str, rank: int = 0, *, json_lines: bool = False, level: str = "info") -> None:
    """Set up structlog for this process and bind `role` and `rank` to every line.

    `json_lines`: one JSON object a line, for files that programs read.
    """
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    renderer = structlog.processors.JSONRenderer() if json_lines else console
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if not json_lines else "iso", utc=json_lines),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, rank=rank)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger; `name` is the part of the system that speaks."""
    return structlog.get_logger(part=name)
