"""At the end, say what was covered: how many tests of each tier, and how long they took."""

from collections import defaultdict

import pytest

TIERS = {
    "unit": "values, state machines, numerics: no sockets, no processes",
    "contract": "one suite over every implementation of a seam",
    "e2e": "real processes, sockets, SLURM",
}
_seconds: dict[str, float] = defaultdict(float)
_tests: dict[str, int] = defaultdict(int)
_tier_of: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _tier_of[item.nodeid] = next((tier for tier in TIERS if item.get_closest_marker(tier)), "unmarked")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tier = _tier_of.get(report.nodeid, "unmarked")
    _seconds[tier] += report.duration
    _tests[tier] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for tier in (*TIERS, "unmarked"):
        if _tests[tier]:
            words = TIERS.get(tier, "give them a tier")
            terminalreporter.write_line(f"{tier:<9} {_tests[tier]:>5} tests {_seconds[tier]:>7.1f} s  {words}")
