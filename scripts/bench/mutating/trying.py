"""Which tests are asked about a change, and which of them notices it first, in a copy of the checkout.

Contract: a mutant is caught by a test that fails, crashes or does not come to its end in time, and that passes without
the change. A test that fails anyhow is asked about no mutant.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from changed import Change, Checkout

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
    "planner/overlaps": "planner_validator",
    "planner/verdict": "planner_validator",
    "planner/stream_check": "planner_validator planner_record",
    "planner/kinds_check": "runtime_admission planner_relations",
    "planner/problem": "planner_pieces planner_arrays",
    "planner/best_fit_by_birth": "planner_births",
    "planner/hole_filling": "planner_constraints planner_schedule",
    "planner/placement": "planner_arrays planner_relations",
    "planner/orders": "planner_arrays",
    "planner/cycle": "planner_schedule",
    "planner/sharing": "planner_schedule planner_record",
    "planner/layout": "planner_arrays",
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
    "runtime/allowance": "runtime_partly_dynamic",
    "runtime/warm_ups": "torch_graphs",
    "replay/torch_cache": "replay_torch replay_torch_record replay_torch_oracle",
    "replay/simulation": "simulate",
    "analysis/error_text": "error_causes error_wordings",
    "analysis/size_text": "error_wordings",
    "analysis/peaks": "stats",
    "analysis/peak_use": "pytest_plugin",
    "analysis/holders": "top",
    "analysis/comparison": "diff",
    "analysis/grouping": "top",
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
        """The first of the tests that breaks; its processes end with it."""
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
