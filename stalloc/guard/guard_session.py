"""The tests of one process, measured one by one and judged: what the plugin does once it is asked to.

Contract: a test counts what it allocates from when its fixtures of a larger scope are there, and what those of them
that it uses hold. So its figure is the same alone, after others, and in whichever worker. A test that fails by itself
is not judged besides.
"""

import dataclasses
import gc
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stalloc.analysis.comparison import lasting
from stalloc.device.known_gpus import parse_memory
from stalloc.errors import StallocError
from stalloc.guard import judgement
from stalloc.guard.judgement import Measured, measure, sites_below
from stalloc.integrations.native_history import Block, NativeHistory
from stalloc.notices import say
from stalloc.trace import Trace, load_traces, save_traces

CHILDREN = "STALLOC_GUARD"  #: names the folder where child processes leave their traces
_Wrapper = Generator[None, Any, Any]


class Guard:
    """Hooks of pytest in the process that runs tests."""

    def __init__(self, config: pytest.Config, *, all_tests: bool) -> None:
        self._option, self._all_tests = config.option, all_tests
        self._site = sites_below(config.rootpath)
        self._artifacts = Path(config.invocation_params.dir, config.option.stalloc_artifacts)
        self._baseline = None
        try:
            if config.option.stalloc_tolerance and not config.option.stalloc_baseline:
                raise pytest.UsageError("--stalloc-tolerance is of a baseline: give --stalloc-baseline FILE too.")
            if config.option.stalloc_baseline and not config.option.stalloc_update:
                self._baseline = judgement.load_baseline(
                    config.option.stalloc_baseline, config.option.stalloc_tolerance
                )
            self._leak_limit = _limit(config.option.stalloc_leaks)
        except StallocError as error:
            raise pytest.UsageError(str(error)) from error
        self._children = tempfile.TemporaryDirectory(prefix="stalloc-")
        os.environ[CHILDREN] = self._children.name
        self._history = NativeHistory()
        self._history.begin()
        self._fixtures: dict[tuple[str, str], dict[Block, int]] = {}
        self._in_setup = False

    def pytest_unconfigure(self) -> None:
        self._history.end()
        os.environ.pop(CHILDREN, None)
        self._children.cleanup()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> _Wrapper:
        self._history.restart()
        for file in Path(self._children.name).iterdir():
            file.unlink(missing_ok=True)
        self._in_setup = True
        try:
            return (yield)
        finally:
            self._in_setup = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> _Wrapper:
        """What fixtures of a larger scope hold is theirs, whichever test happens to be the first that uses them."""
        if fixturedef.scope == "function" or not self._in_setup:
            return (yield)
        before = self._history.live()
        result = yield
        new = {block: size for block, size in self._history.live().items() if block not in before}
        if new:
            self._fixtures[_key(fixturedef)] = new
        self._history.restart()
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        self._fixtures.pop(_key(fixturedef), None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> _Wrapper:
        report = yield
        try:
            if call.when in ("setup", "call") and (call.when == "call" or call.excinfo is not None):
                self._judge_run(item, call, report)
            elif call.when == "teardown" and report.passed:
                self._judge_rest(item, report)
        except StallocError as error:
            _fail(report, f"stalloc: {error}")
        return report

    def _judge_run(self, item: pytest.Item, call: Any, report: pytest.TestReport) -> None:
        limit = _marked(item, "limit_gpu_memory")
        if not self._all_tests and limit is None:
            return
        if call.excinfo is not None:
            if "OutOfMemory" in call.excinfo.typename:
                traces = self._history.traces(item.nodeid)
                used = None if traces else self._history.live()
                measured = self._saved(measure(item.nodeid, traces, used, self._site), traces)
                report.sections.append(("GPU memory when it ran out", judgement.held_at_error(measured).text(measured)))
            return
        measured, traces = self._measured(item)
        finding = None
        if limit is not None:
            marker = item.get_closest_marker("limit_gpu_memory")
            given = marker.args[0] if marker is not None and marker.args else ""
            finding = judgement.over_limit(measured, limit, f"limit_gpu_memory({str(given)!r})")
        if finding is None and self._baseline is not None and item.nodeid in self._baseline.entries:
            finding = judgement.over_baseline(measured, self._baseline.entries[item.nodeid], self._baseline.tolerance)
        if finding is not None:
            measured = self._saved(measured, traces)
            _fail(report, finding.text(measured))
        report.stalloc = dataclasses.asdict(measured)  # type: ignore[attr-defined]

    def _judge_rest(self, item: pytest.Item, report: pytest.TestReport) -> None:
        marked = _marked(item, "limit_gpu_leaks", "0")
        limit = self._leak_limit if marked is None else marked
        if limit is None:
            return
        getattr(item, "funcargs", {}).clear()  # pytest would let go of them in a moment
        gc.collect()
        self._history.settle()
        traces = self._history.traces(item.nodeid)
        left = tuple(one for trace in traces for one in lasting(trace, site=self._site))
        measured = measure(item.nodeid, traces, {}, self._site, left=left)
        finding = judgement.leaked(measured, limit)
        if finding is not None:
            measured = self._saved(measured, traces)
            _fail(report, finding.text(measured))
            report.stalloc = dataclasses.asdict(measured)  # type: ignore[attr-defined]

    def _measured(self, item: pytest.Item) -> tuple[Measured, list[Trace]]:
        """What a test needed, in this process or a child, whichever took more; and the traces of that one."""
        traces = self._history.traces(item.nodeid)
        used: dict[Block, int] = {}  # by its fixtures
        for (name, place), blocks in self._fixtures.items():
            if name in getattr(item, "fixturenames", ()) and item.nodeid.startswith(place):
                used |= blocks
        measured = measure(item.nodeid, traces, used, self._site).with_reserved(self._history.cached_by_cupy())
        for file in sorted(Path(self._children.name).glob("*.trace.npz")):
            try:
                of_child = load_traces(file)
            except StallocError as error:
                say(f"the record of a child process of {item.nodeid} cannot be read: {error}")
                continue
            command = next((str(trace.info.get("process", "")) for trace in of_child), "")
            child = measure(item.nodeid, of_child, site=self._site, process=command or "unnamed")
            if child.use.allocated_peak_bytes > measured.use.allocated_peak_bytes:
                measured, traces = child, of_child
        return measured, traces

    def _saved(self, measured: Measured, traces: list[Trace]) -> Measured:
        """With the trace in a file, beside those of other failures."""
        if not traces:
            return measured
        name = re.sub(r"[^\w.-]+", "-", measured.name)[-120:].strip("-")
        file = self._artifacts / f"{name}.trace.npz"
        try:
            self._artifacts.mkdir(parents=True, exist_ok=True)
            save_traces(file, traces)
        except (OSError, StallocError) as error:
            say(f"the trace of {measured.name} cannot be saved: {error}")
            return measured
        return dataclasses.replace(measured, trace_file=os.path.relpath(file))


def _key(fixturedef: Any) -> tuple[str, str]:
    return str(fixturedef.argname), str(fixturedef.baseid)


def _limit(text: Any) -> int | None:
    return None if text is None else 0 if str(text) == "0" else parse_memory(text)


def _marked(item: pytest.Item, name: str, default: str | None = None) -> int | None:
    """The bytes of a marker, None without it. Raises BadInputError for one that is no size."""
    marker = item.get_closest_marker(name)
    if marker is None:
        return None
    given = marker.args[0] if marker.args else marker.kwargs.get("size", default)
    return _limit(given if given is not None else "")


def _fail(report: pytest.TestReport, text: str) -> None:
    report.outcome = "failed"
    report.longrepr = text
