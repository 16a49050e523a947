"""Which sources compiled code is of, and what is compiled anew when one of them changes."""

import ast
import contextlib
import glob
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy
import pytest
from warm_programs import run_compiling

import stalloc
from stalloc import source_stamps
from stalloc.cli.precompile import small_snapshot
from stalloc.integrations import build_backend

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from changed import Change, Checkout

pytestmark = pytest.mark.usefixtures("usual_umask")


@pytest.mark.slow
def test_a_wheel_brings_compiled_code_that_is_used_until_a_source_changes(tmp_path: Path) -> None:
    """A wheel as setuptools makes it of these sources, installed by unpacking it."""
    root, wheel = Path(stalloc.__file__).resolve().parent, tmp_path / "stalloc-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            archive.write(path, Path("stalloc") / path.relative_to(root))
        archive.writestr("stalloc-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("stalloc-1.dist-info/RECORD", "stalloc-1.dist-info/RECORD,,\n")
    made, installed = build_backend.add_compiled_code(wheel), tmp_path / "installed"
    assert re.fullmatch(r"stalloc-1-cp(3\d+)-cp\1-linux_\w+\.whl", made.name)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(installed)
        assert f"Tag: {made.stem.partition('-1-')[2]}\n" in archive.read("stalloc-1.dist-info/WHEEL").decode()
    (installed / "numpy").symlink_to(Path(numpy.__file__).parent)  # beside it, where pip puts packages
    snapshot, kept = tmp_path / "small.pickle", tmp_path / "kept"
    snapshot.write_bytes(pickle.dumps(small_snapshot()))
    environment = {**os.environ, "PYTHONPATH": str(installed), "NUMBA_CACHE_DIR": str(kept)}

    def explain() -> tuple[str, int]:
        command = [sys.executable, "-P", "-m", "stalloc", "explain", str(snapshot)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return done.stderr, len(list(kept.rglob("*.compiled")))

    assert explain() == ("", 0)
    constants = installed / "stalloc" / "core" / "constants.py"
    constants.write_text(constants.read_text() + "\n")
    said, num_compiled = explain()
    assert said.startswith("stalloc: compiling")
    assert num_compiled > 0


@pytest.mark.slow
def test_an_editable_install_compiles_ahead(tmp_path: Path) -> None:
    """What is of `lifespans`, which explain uses; of the rest it finds what this checkout has compiled."""
    root, sources = Path(stalloc.__file__).resolve().parent, tmp_path / "sources"
    shutil.copytree(root, sources / "stalloc", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.rmtree(sources / "stalloc" / "lifespans" / "__pycache__", ignore_errors=True)
    ahead = (
        "import pathlib, sys; from stalloc.integrations import build_backend\n"
        "build_backend.compile_ahead(pathlib.Path(sys.argv[1]))\n"
    )
    snapshot = tmp_path / "small.pickle"
    snapshot.write_bytes(pickle.dumps(small_snapshot()))
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def python(*arguments: str) -> str:
        command, variables = [sys.executable, "-P", *arguments], environment | {"PYTHONPATH": str(sources)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    python("-c", ahead, str(sources))
    before = set(sources.rglob("*.compiled"))
    assert any(path.parents[1].name == "lifespans" for path in before)
    assert python("-m", "stalloc", "explain", str(snapshot)) == ""
    assert set(sources.rglob("*.compiled")) == before


IMPORTING = {
    "__init__.py": "",
    "sizes.py": "NUMBER = 2",
    "base.py": """
from stalloc.compiled import inner
from made_up_package import sizes

@inner()
def several(x):
    return sizes.NUMBER * x
""",
    "between.py": "from .base import (\n    several,\n)",
    "top.py": """
from stalloc.compiled import njit
from made_up_package.between import several
from made_up_package.one import one

@njit()
def more(x):
    return several(x) + one(x)
""",
    "one.py": """
from stalloc.compiled import njit

@njit()
def one(x):
    return 1
""",
    "other.py": """
from stalloc.compiled import njit

@njit()
def other(x):
    return x

def not_compiled():
    from made_up_package import top
    return top
""",
}


CHANGES = [  # of a file, what `more` gives of 10 then, and whether `more`, `one` and `other` were found compiled
    ("sizes.py", "NUMBER = 3", 31, [0, 1, 1]),
    ("between.py", "from .base import several", 31, [0, 1, 1]),
    ("base.py", IMPORTING["base.py"].replace("* x", "* x + 5"), 36, [0, 1, 1]),
    ("one.py", IMPORTING["one.py"].replace("return 1", "return 2"), 37, [0, 0, 1]),
    ("other.py", IMPORTING["other.py"].replace("return x", "return x + 1"), 37, [1, 0, 0]),
]


def test_a_changed_file_has_compiled_anew_what_depends_on_it_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "made_up_package"
    folder.mkdir()
    for name, source in IMPORTING.items():
        (folder / name).write_text(source)
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from made_up_package.top import more\n"
        "from made_up_package.one import one; from made_up_package.other import other\nresult = more(10); other(1)\n"
        "print(json.dumps([result, [sum(each.stats.cache_hits.values()) for each in (more, one, other)]]))\n"
    )

    def run() -> list[object]:
        done = run_compiling(program, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run() == [21, [0, 0, 0]]
    for changed, source, result, hits in CHANGES:
        (folder / changed).write_text(source)
        assert run() == [result, hits], changed


_ONE_REQUEST = """
import numpy as np
from stalloc.replay import Events, Kind
from stalloc.replay.registry import make

model, number = make("cupy", "", 0), np.array([0])
model.feed(Events(np.array([Kind.ALLOC], np.int8), number, number, np.array([1]), number))
print(model.counters().reserved_bytes)
"""


@pytest.mark.slow
def test_a_model_is_compiled_anew_when_its_rules_change() -> None:
    """The loop that its rules are compiled into stands in another file, which does not import them."""
    twice = Change(name="unit", file="stalloc/replay/cupy_pool.py", old="requested, ALIGN", new="requested, 2 * ALIGN")
    with Checkout.copied() as base:
        assert base.run("-c", _ONE_REQUEST, capture_output=True, check=True).stdout == "512\n"
        with base.changed(twice) as copy:
            assert copy.run("-c", _ONE_REQUEST, capture_output=True, check=True).stdout == "1024\n"


def test_packages_in_the_same_folder_are_no_part_of_a_stamp(tmp_path: Path) -> None:
    """Whoever installs stalloc has numpy beside it, and whoever builds a wheel of it may not."""
    for package in ("made_up_package", "beside"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    source = tmp_path / "made_up_package" / "top.py"
    source.write_text("import beside\nfrom beside import other\nfrom made_up_package import near\n")
    near, other = source.with_name("near.py"), tmp_path / "beside" / "other.py"
    near.write_text("")
    before = source_stamps.sources_of(str(source))
    assert str(near) in before
    other.write_text("")
    assert source_stamps.sources_of(str(source)) == before
    assert not [one for one in before if "beside" in one]


def test_what_stalloc_itself_brings_is_part_of_the_stamp_of_any_file(tmp_path: Path) -> None:
    """Records of the core that are laid out anew would have code of a benchmark or of an extension write elsewhere."""
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "__init__.py").write_text("")
    source = tmp_path / "extension" / "model.py"
    source.write_text("import numpy\nfrom stalloc.core.records import state_at\nfrom stalloc.replay import blocks\n")
    found = {Path(one).name for one in source_stamps.sources_of(str(source))}
    assert {"records.py", "record_types.py", "blocks.py"} <= found


def _module_level_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """What is imported while a module is, save for type checkers only."""
    rest: list[ast.AST] = [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            rest += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rest += ast.iter_child_nodes(node)


@cache
def _imported_files(module: str, path: Path) -> set[Path]:
    """The files of stalloc that a module imports, by Python's own rules."""
    names = set()
    for node in _module_level_imports(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    found = set()
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # a name that is no module, of one that is no package
            spec = importlib.util.find_spec(name) if name.partition(".")[0] == "stalloc" else None
            found |= {Path(spec.origin)} if spec and spec.origin else set()
    return found


def test_the_sources_of_compiled_code_are_those_that_python_finds() -> None:
    package = Path(stalloc.__file__).parent
    files = {Path(path) for path in glob.glob(f"{package}/**/*.py", recursive=True)}
    makers = {package / name for name in ("compiled.py", "compiler.py")}
    compiled = {path for path in files if re.search(r"^@(njit|inner|cfunc)\(", path.read_text(), re.MULTILINE)}
    assert len(compiled) > 30
    for path in compiled:
        sources = {Path(one) for one in source_stamps.sources_of(str(path))}
        assert makers < sources
        for source in sources - makers:
            parts = source.relative_to(package.parent).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            missing = _imported_files(module, source) - sources
            assert not missing, f"{source}, for {path}"


CALLERS = """
import numpy as np

from stalloc.compiled import BORROWING, inner, njit

@inner()
def three_ways(x):
    if x > 2:
        return x, True
    while x < 0:
        x += 2
    return max(x, 1), False

@inner(forceinline=True)
def twice(x):
    return three_ways(x)[0] + three_ways(-x)[0]

@njit(**BORROWING)
def total(values, squares):
    found = 0
    for i in range(len(values)):
        squares[i] = values[i] * values[i]
        found += twice(values[i]) if three_ways(values[i])[1] else -1
    return found, min(len(values), 3)

@njit()
def first_half(values):
    return values[: len(values) // 2].copy() + 1
"""


def test_functions_that_only_compiled_code_calls_are_compiled_into_their_callers(tmp_path: Path) -> None:
    """Numbers, tuples, loops, branches and arrays, through two compiled functions with one caller."""
    (tmp_path / "callers.py").write_text(CALLERS)
    program = (
        "import json, sys; import numpy as np; sys.path.insert(0, sys.argv[1]); import callers\n"
        "squares = np.zeros(4, np.int64)\n"
        "total = callers.total(np.array([5, 2, -3, 4]), squares)\n"
        "print(json.dumps([total, squares.tolist(), callers.first_half(np.arange(5)).tolist()]))\n"
    )
    for _ in range(2):  # compiled, and as it was kept
        done = run_compiling(program, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [[5 + 1 - 1 - 1 + 4 + 1, 3], [25, 4, 9, 16], [1, 2]]
    assert len(list((tmp_path / "kept").rglob("*.compiled"))) == 2
