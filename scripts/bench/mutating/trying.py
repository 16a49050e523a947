"""The numbers that decide, each halved and doubled; and which tests notice a change first, in a copy of the checkout.

Contract: found are the constants of modules, whose names are in capitals: `NAME = 1 / 8`, `A, B = 3, 4 << 20`; in a
table of thresholds the defaults of fields, too, `share: float = 0.5`, and the first number of what makes an entry,
`LIMIT = Threshold(16, …)`. Left out are numbers that decide nothing: codes, layouts, and what a change only breaks.
A mutant is caught by a test that fails, crashes or does not come to its end in time, and that passes without the
change. A test that fails anyhow is asked about no mutant.
"""

import ast
import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from changed import ROOT, Change, Checkout

THRESHOLDS = "stalloc/runtime/thresholds.py"
_NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")
#: names that say that a number stands for something, or is as wide as a field
_CODES = re.compile(
    r"_?(NO_\w+|ACTION_\w+|BLOCK_\w+|CLOCK|MODE_\w+|\w+_KIND|\w+_KINDS|\w+_BITS|\w+_MASK|\w+_USER|AT_\w+|USE_\w+|POOL_\w+|"
    r"BYPASS\w*|APART_\w+|POLL\w*|NEED_\w+|ASKED|HEAP_ONLY|GOT_PAGES|KNOWN|\w+_CLOCK|\w*WORDS?|NOT_READY|DONT_NEED|DRIVER_STATUS|UNMAPPED|NEVER|HASH|NOISE|ALL|MANY|WORK|PER_THREAD|ROWS|FULL_\w+)"
)


def files_with_numbers(root: Path = ROOT) -> list[str]:
    """Where numbers that decide stand: in one table, or else all over the runtime and the core."""
    if (root / THRESHOLDS).exists():
        return [THRESHOLDS]
    found = [*(root / "stalloc" / "runtime").glob("*.py"), *(root / "stalloc" / "core").glob("*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def halved_and_doubled(files: Sequence[str], root: Path = ROOT) -> list[Change]:
    return [change for file in files for change in _changes(file, (root / file).read_text(encoding="utf-8"))]


def _changes(file: str, source: str) -> Iterator[Change]:
    for statement, name, value in _numbers(ast.parse(source), is_table=Path(file).name == Path(THRESHOLDS).name):
        whole, number = (ast.get_source_segment(source, node) or "" for node in (statement, value))
        begin = _place(statement, value, source)
        for factor in ("halved", "doubled"):
            text = _scaled(value, number, factor)
            if text is not None:
                yield Change(
                    name=f"{file.removeprefix('stalloc/').removesuffix('.py')}:{name} {factor}",
                    file=file,
                    old=f"\n{' ' * statement.col_offset}{whole}",
                    new=f"\n{' ' * statement.col_offset}{whole[:begin]}{text}{whole[begin + len(number) :]}",
                    why=f"{number} is {text}",
                )


def _place(statement: ast.stmt, value: ast.expr, source: str) -> int:
    lines = source.splitlines(keepends=True)

    def at(node: ast.stmt | ast.expr) -> int:
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        return sum(map(len, lines[: node.lineno - 1])) + len(before)

    return at(value) - at(statement)


def _numbers(module: ast.Module, is_table: bool) -> Iterator[tuple[ast.stmt, str, ast.expr]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            for field in node.body if is_table else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    yield from (
                        (field, f"{node.name}.{name}", value)
                        for name, value in _named(field.target, field.value, is_table)
                    )
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if len(targets) == 1 and value is not None:
            for name, number in _named(targets[0], value, is_table):
                if _NAME.fullmatch(name.partition("[")[0]) and not _CODES.fullmatch(name.partition("[")[0]):
                    yield node, name, number


def _named(target: ast.expr, value: ast.expr, is_table: bool) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _named(one, its, is_table)
    elif isinstance(target, ast.Name):
        if isinstance(value, ast.Tuple):
            for index, its in enumerate(value.elts):
                if _is_number(its):
                    yield f"{target.id}[{index}]", its
        elif isinstance(value, ast.Call) and is_table:
            given = [*value.args, *(keyword.value for keyword in value.keywords)]
            yield from ((target.id, its) for its in [one for one in given if _is_number(one)][:1])
        elif _is_number(value):
            yield target.id, value


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is of numbers and names in capitals, with a number that is not negative among them."""
    parts = list(ast.walk(value))
    allowed = (ast.Constant, ast.BinOp, ast.operator, ast.Name, ast.Load)
    if not all(isinstance(part, allowed) for part in parts):
        return False
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    are_numbers = all(type(one) in (int, float) for one in constants)
    return bool(constants) and are_numbers and all(_NAME.fullmatch(name) for name in names)


def _scaled(value: ast.expr, text: str, factor: str) -> str | None:
    """Half or twice a number; None where that is the same number."""
    inner = text if isinstance(value, ast.Constant) else f"({text})"
    if factor == "doubled":
        return None if isinstance(value, ast.Constant) and value.value == 0 else f"{inner} * 2"
    is_whole = not any(
        isinstance(part, ast.Div) or (isinstance(part, ast.Constant) and isinstance(part.value, float))
        for part in ast.walk(value)
    )
    if isinstance(value, ast.Constant) and value.value == 0:
        return None
    return f"{inner} // 2" if is_whole else f"{inner} / 2"


#: tests of a folder of the package, whichever of its modules is changed
_OF_FOLDER = {
    "planner": "planner_validator planner_arrays planner_births planner_pieces planner_constraints planner_relations "
    "planner_search planner_schedule planner_real planner_record regions",
    "lifespans": "lifespans_load lifespans_schedule lifespans_periods lifespans_classes lifespans_unmarked "
    "planner_schedule stats",
    "core": "runtime_heap runtime_page_heap growth runtime_replay runtime_handing runtime_shared_blocks runtime_arena "
    "runtime_schedules runtime_full_tables integrations_streams regions runtime_pages "
    "runtime_shared_pages torch_statistics runtime_fuzz",
    "runtime": "runtime_steps runtime_replay runtime_kinds runtime_arenas runtime_pages",
    "replay": "replay_models_rules replay_models replay_torch_record replay_torch replay_models_cupy simulate settings",
    "analysis": "explain error_causes error_log error_wordings stats top diff",
    "": "figures stats top explain",
}
#: those of a module that have most to say about it, and are asked first
_OF_MODULE = {
    "planner/problem": "planner_pieces planner_arrays",
    "planner/hole_filling": "planner_births planner_arrays planner_constraints planner_schedule",
    "planner/validator": "planner_validator planner_record planner_relations runtime_admission",
    "planner/planning": "planner_arrays planner_schedule planner_record",
    "planner/placement": "planner_arrays planner_relations",
    "planner/cycle": "planner_schedule",
    "lifespans/load_curves": "lifespans_load stats",
    "core/requests": "runtime_replay",
    "core/segments": "runtime_heap",
    "core/handovers": "runtime_handing integrations_streams",
    "core/pages": "runtime_page_heap runtime_pages",
    "core/lending": "runtime_arena runtime_replay runtime_partly_dynamic",
    "core/frees": "runtime_shared_blocks integrations_streams",
    "core/counters": "torch_statistics runtime_replay runtime_steps",
    "core/schedule_cursor": "runtime_replay runtime_partly_dynamic",
    "core/arena_schedule": "runtime_schedules",
    "runtime/paging": "runtime_partly_dynamic",
    "runtime/captures": "torch_graphs",
    "replay/torch_cache": "replay_torch replay_torch_record replay_torch_oracle",
    "replay/simulation": "simulate",
    "analysis/error_text": "error_causes error_wordings",
    "analysis/moments": "stats",
    "analysis/holders": "top",
    "analysis/comparison": "diff pytest_plugin",
}


def relevant_tests(file: str, root: Path) -> list[str]:
    """Paths in the checkout, those that have most to say about the module first."""
    path = Path(file)
    folder = path.parts[1] if len(path.parts) > 2 else ""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    stem = re.compile(rf"test_(\w+_)?{re.escape(path.stem.removesuffix('s'))}s?(_\w+)?\.py")
    named = re.compile(rf"{re.escape(module)}\b")
    own = [test for test in _texts(root) if stem.fullmatch(test.name)]
    naming = [test for test, text in _texts(root).items() if named.search(text)]
    first, rest = (
        [root / "tests" / f"test_{name}.py" for name in names.split()]
        for names in (_OF_MODULE.get(f"{folder}/{path.stem}", ""), _OF_FOLDER.get(folder, _OF_FOLDER[""]))
    )
    found = dict.fromkeys(test for test in (*first, *own, *rest, *naming) if test.exists())
    return [test.relative_to(root).as_posix() for test in found]


@cache
def _texts(root: Path) -> dict[Path, str]:
    return {test: test.read_text(encoding="utf-8") for test in sorted((root / "tests").glob("test_*.py"))}


_PYTEST = ("-m", "pytest", "-v", "-x", "--tb=no", "--durations=0", "-p", "no:cacheprovider", "-o", "addopts=")
_PASSES = (0, 5)  # of pytest: all passed; there was none to be run
_BROKEN = re.compile(r"^(tests/.+::.+?) (?:FAILED|ERROR) +\[ *\d+%\]$", re.MULTILINE)
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)  # where its result has no line
_BEGUN = re.compile(r"^(tests/.+::.+?) *\Z", re.MULTILINE)  # the last line, of a test without a result
_TOOK = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/\S+?\.py)::", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    why: str
    caught_by: str
    """The first test that notices; empty: it survived."""
    how: str
    """What that test does: "fails", or how it ends."""
    seconds: float

    @property
    def survived(self) -> bool:
        return not self.caught_by

    @property
    def line(self) -> str:
        end = f"caught by {self.caught_by}, which {self.how}" if self.caught_by else f"SURVIVED: {self.why}"
        return f"{self.name}: {end} ({self.seconds:.0f} s)"


@dataclass(frozen=True)
class _Broken:
    test: str  # a test, or a file of them
    how: str


class Trials:
    """Asks tests of one checkout about mutants of it, and remembers what it learns of the tests."""

    def __init__(self, base: Checkout, limit_seconds: float) -> None:
        self._base = base
        self._limit_seconds = limit_seconds
        self._passes: dict[str, bool] = {}  # without a change, by test
        self._seconds_of: dict[str, float] = {}  # by file, as far as one was run to its end
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    @property
    def failing(self) -> list[str]:
        return [test for test, passes in self._passes.items() if not passes]

    def stop(self) -> None:
        for process in list(self._running):
            _end(process)

    def try_one(self, change: Change, tests: Sequence[str]) -> Mutant:
        """Make a mutant and ask files of tests: those known to be quick first, else as they are given."""
        began = time.monotonic()
        ordered = sorted(tests, key=lambda test: self._seconds_of.get(test, math.inf))
        with self._base.changed(change) as copy:
            broken = self._run(copy, ordered)
            while broken is not None and not self._passes_unchanged(broken.test or ordered[0]):
                broken = self._run(copy, ordered)
        seconds = round(time.monotonic() - began, 1)
        if broken is None:
            return Mutant(change.name, change.file, change.why, "", "", seconds)
        return Mutant(change.name, change.file, change.why, broken.test or ordered[0], broken.how, seconds)

    def _passes_unchanged(self, test: str) -> bool:
        with self._lock:  # what is compiled for it is kept in the base, for the copies to come
            if test not in self._passes:
                self._passes[test] = self._run(self._base, [test]) is None
            return self._passes[test]

    def _run(self, checkout: Checkout, tests: Sequence[str]) -> _Broken | None:
        output = checkout.root / ".pytest-output"
        left_out = [f"--deselect={test}" for test in self.failing]
        command = checkout.command(*_PYTEST, "-m", "not slow", f"--basetemp={output}.tmp", *left_out, *tests)
        # strangers' data makes tests longer, and the same tests run on recordings of our own
        variables = checkout.environment | {"STALLOC_SHARED": f"{output}.nothing"}
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=checkout.root,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code = process.wait(self._limit_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
                self._running.discard(process)
        said = output.read_text(encoding="utf-8", errors="replace")
        if code in _PASSES:
            for test in tests:
                self._seconds_of[test] = sum(float(took) for took, file in _TOOK.findall(said) if file == test)
            return None
        found = _BROKEN.search(said) or _SUMMARY.search(said) or _BEGUN.search(said)
        if code in (1, 2) and found:
            return _Broken(found[1], "fails")
        how = "is not over in time" if code is None else f"ends with exit code {code}"
        return _Broken(
            found[1] if found else "", f"ends with {signal.Signals(-code).name}" if code and code < 0 else how
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
