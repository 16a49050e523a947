"""docs/architecture.md: the folders are those that there are, and imports point the way the page says.

Functions stay short enough to be read at one go.
A module's name says which it is, without its folder.
"""

import ast
import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = re.findall(r"^\| `(?:stalloc/)?(\w+)/` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
BELOW_ALL = ("device", "kernels")  #: the last rows

MAX_FUNCTION_LINES = 60
MAX_TYPE_CIRCLE = 3  # modules of the runtime that name each other's types
MAX_GLOBALS = 5  # statements; what changes in a process stands in objects, such as integrations/installation.py
#: names that two modules may have, and why
NAMED_TWICE = {
    "record.py": "the verb `stalloc record` beside the Trace record; a verb's module is called what the verb is",
}


@functools.cache
def sources() -> dict[str, Path]:
    """All modules by their path in the repository."""
    found = [*(ROOT / "stalloc").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path for path in found}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A source as a tree, which several tests walk."""
    return ast.parse(path.read_text())


@functools.cache
def statements(path: Path, *, for_types: bool = True) -> list[ast.stmt]:
    """All statements of a source, in functions too: most of a tree are expressions, which hold none."""
    return list(within(parsed(path), for_types))


def within(node: ast.AST, for_types: bool) -> Iterator[ast.stmt]:
    """The statements below a node, with or without those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            if not for_types and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from within(child, for_types)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def imported(folder: str) -> set[str]:
    """The folders of stalloc that modules of a folder import from."""
    base = ROOT / folder if folder == "kernels" else ROOT / "stalloc" / folder
    found = set()
    for path in base.rglob("*.py"):
        for node in statements(path):
            if isinstance(node, ast.ImportFrom) and node.module == "stalloc":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stalloc."):
                found.add(node.module.split(".")[1])
    return found & set(FOLDERS)


def test_every_folder_is_on_the_page():
    there = {path.parent.name for path in (ROOT / "stalloc").glob("*/__init__.py")} | {"kernels"}
    assert sorted(FOLDERS) == sorted(there)
    assert tuple(FOLDERS[-2:]) == BELOW_ALL


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_to_rows_above_or_to_the_last_two(folder):
    allowed = {folder, *BELOW_ALL}
    if folder not in BELOW_ALL:
        allowed |= set(FOLDERS[: FOLDERS.index(folder)])
    assert imported(folder) <= allowed


def module_of(path: str) -> str:
    """What a source is imported as."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("stalloc") else f"stalloc.{name}"


def imported_modules(path: str, modules: set[str], *, for_types: bool) -> set[str]:
    """The modules of stalloc that one imports, in functions too; with or without those for type checkers only."""
    package = module_of(path) if path.endswith("/__init__.py") else module_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in statements(sources()[path], for_types=for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules | ({base} if names - modules else set())
    return found & modules - {module_of(path)}


def circles(*, for_types: bool) -> list[set[str]]:
    """Modules that lead to each other by their imports."""
    modules = {module_of(path) for path in sources()}
    graph = nx.DiGraph(
        (module_of(path), imported)
        for path in sources()
        for imported in imported_modules(path, modules, for_types=for_types)
    )
    assert len(graph) > 200
    return [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


def test_no_imports_go_in_a_circle():
    assert circles(for_types=False) == []


def test_imports_for_types_go_in_no_circle_but_the_runtimes():
    found = circles(for_types=True)
    assert len(found) <= 1
    for circle in found:
        assert len(circle) <= MAX_TYPE_CIRCLE
        assert {name.rpartition(".")[0] for name in circle} == {"stalloc.runtime"}


def test_modules_that_the_page_names_are_there():
    named = re.findall(r"`(\w+\.(?:py|c))`", (ROOT / "docs" / "architecture.md").read_text())
    there = {path.name for folder in ("stalloc", "kernels") for path in (ROOT / folder).rglob("*.*")}
    assert set(named) - there == set()


def test_a_name_stands_for_one_module():
    names = Counter(path.name for path in sources().values())
    twice = {name for name, count in names.items() if count > 1} - {"__init__.py"}
    assert twice == set(NAMED_TWICE), "name each module so that its folder is not needed to tell which it is"


def test_few_modules_assign_to_their_globals():
    found = [name for name, path in sources().items() for node in statements(path) if isinstance(node, ast.Global)]
    assert len(found) <= MAX_GLOBALS, found


def test_functions_are_short():
    longer = {
        f"{name}: {node.name}"
        for name, path in sources().items()
        for node in statements(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > MAX_FUNCTION_LINES
    }
    assert longer == set()
