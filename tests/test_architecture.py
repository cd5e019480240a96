"""The rules of the layout, as tests that fail."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import registry

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
LAYERS = ("common", "brokers", "workers", "launch")
TOP_LEVEL = {*LAYERS, "configs", "tests", "pyproject.toml", "README.md"}
HOUSEKEEPING = {"Makefile", "constraints.txt", "LICENSE", ".gitignore", ".ci"}
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[str]:
    """Yield the top-level names of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_only_to_layers_on_the_left(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    right = set(LAYERS[LAYERS.index(layer) + 1 :])
    assert not right & set(imports_of(path))


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("common/")], ids=relative)
def test_common_knows_neither_sockets_nor_torch(path: Path) -> None:
    assert not {"zmq", "torch", "transformers", "socket"} & set(imports_of(path))


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("brokers/")], ids=relative)
def test_brokers_know_no_torch_and_decode_no_payload(path: Path) -> None:
    journal = relative(path) in {"brokers/journal.py", "brokers/playback.py"}
    allowed = {"pyarrow"} if journal else set[str]()  # its own rows, not the groups'
    assert not {"torch", "transformers", "pyarrow"} & set(imports_of(path)) - allowed


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_is_pickled(path: Path) -> None:
    assert not {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(imports_of(path))


@pytest.mark.parametrize("path", [p for p in SOURCES if not relative(p).startswith("launch/")], ids=relative)
def test_only_launch_reads_the_environment(path: Path) -> None:
    read = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not {"environ", "getenv"} & set(read)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_file_is_named_after_nothing(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "misc", "manager", "base", "tools"}


def test_the_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.partition("/")[0] for name in tracked.splitlines()} <= TOP_LEVEL | HOUSEKEEPING


COMPONENTS = [(kind, name) for kind in registry.HOMES for name in registry.known(kind)]


def test_every_component_can_be_configured_without_torch() -> None:
    """A configuration is checked in milliseconds: importing all components and making their options loads no torch."""
    script = (
        "import sys\n"
        "from workers import registry\n"
        f"for kind, name in {COMPONENTS!r}:\n"
        "    registry.options(kind, name)\n"
        "loaded = {'torch', 'transformers', 'sklearn', 'tensorboard'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_no_algorithm_is_named_outside_its_own_file() -> None:
    """An algorithm is one file: nobody else compares its name."""
    names = registry.known("algorithm")
    for path in SOURCES:
        if path.parent.name == "algorithms":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                assert not set(names) & set(map(str, constants)), f"{relative(path)}:{node.lineno}"
