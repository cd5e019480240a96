"""Limits on size that keep the code readable. When one fails, there is a second idea in the file or the function."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
SOURCES = [p for layer in ("common", "brokers", "workers", "launch") for p in sorted((ROOT / layer).rglob("*.py"))]
FILE_LINES, FUNCTION_LINES = 300, 60
PROBES_PER_KLOC = 3.0
RUNS_USER_CODE = {"workers/reward/child.py"}  # whatever a reward throws is the status of one sample
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, FUNCTION) and node.end_lineno is not None
    }
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_handler_swallows_everything(path: Path) -> None:
    """`except Exception` and bare `except` may only clean up and raise again."""
    if relative(path) in RUNS_USER_CODE:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            name = node.type.id if isinstance(node.type, ast.Name) else ""
            broad = node.type is None or name in {"Exception", "BaseException"}
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert not broad or raises, f"{relative(path)}:{node.lineno}"


def test_attributes_are_rarely_guessed() -> None:
    """getattr, hasattr and setattr blind the type checker; Protocols do not."""
    lines = sum(len(path.read_text().splitlines()) for path in SOURCES)
    probes = sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "hasattr", "setattr"}
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
    )
    assert probes / lines * 1000 <= PROBES_PER_KLOC


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module says what it is for"
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{relative(path)}: {node.name}"
