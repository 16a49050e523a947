"""The pytest plugin, as far as it is loaded in every run: options, markers, and the virtual GPU that comes first.

Contract: nothing else of stalloc is imported until a marker or an option of it is used.
"""

import os
import sys
from typing import Any

import pytest

MARKERS = (
    'limit_gpu_memory(size): the test fails if it allocates more at its peak, for example "2 GiB" (stalloc)',
    'limit_gpu_leaks(size="0"): the test fails if more of what it allocates is left after it (stalloc)',
)


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("stalloc", "GPU memory (stalloc)").addoption
    add("--stalloc", action="store_true", help="measure the GPU memory of all tests, tell who takes most")
    add("--stalloc-baseline", metavar="FILE", help="fail where more is allocated than FILE (JSON) says")
    add("--stalloc-update", action="store_true", help="write what is measured to the baseline instead")
    add("--stalloc-tolerance", metavar="GROWTH", help="allowed growth over the baseline: 5%% or 200MiB")
    add(
        "--stalloc-leaks",
        metavar="SIZE",
        nargs="?",
        const="0",
        help="fail where more than SIZE (default: nothing) of what a test allocates is left after it",
    )
    add("--stalloc-artifacts", metavar="DIR", default=".stalloc", help="where traces of failures are saved")
    add(
        "--stalloc-gpu",
        metavar="GPU",
        help="run on a virtual GPU, without any: virtual, virtual:H100, virtual:24GiB or virtual:2xH100",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Leave the asserts of stalloc as they are, and put the virtual GPU in place before a conftest imports torch."""
    _leave_asserts(early_config)
    gpu = early_config.known_args_namespace.stalloc_gpu
    if gpu is not None:
        _put_in_place(gpu)


def _leave_asserts(config: pytest.Config) -> None:
    """pytest rewrites the asserts of all modules of a package with a plugin; ours are no tests, and some compile."""
    hook = getattr(config.pluginmanager, "rewrite_hook", None)
    marked = getattr(hook, "_must_rewrite", None)
    if isinstance(marked, set):
        marked.discard("stalloc")


def _put_in_place(text: str) -> None:
    """Let this process and its children have the virtual GPU that `--stalloc-gpu` names. Raises UsageError."""
    from stalloc import device
    from stalloc.errors import StallocError
    from stalloc.integrations.startup import chosen_device

    try:
        kind, gpu = chosen_device(text, "--stalloc-gpu")
        if kind != "virtual":
            return
        early = [name for name in ("torch", "cupy") if name in sys.modules]
        if early and device.active() != "virtual":
            raise pytest.UsageError(
                f"--stalloc-gpu {text} came too late: {' and '.join(early)} was imported before pytest read its "
                "options, by a plugin or by what started pytest: leave that out, or load it later from a conftest.py."
            )
        device.activate("virtual", gpu)
    except StallocError as error:
        raise pytest.UsageError(str(error)) from error
    os.environ["STALLOC_DEVICE"] = text


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(_Listener(config), "stalloc-listener")
    if option.stalloc_update and not option.stalloc_baseline:
        raise pytest.UsageError("--stalloc-update needs a file to write: give --stalloc-baseline FILE too.")
    if option.stalloc or option.stalloc_baseline or option.stalloc_leaks is not None or option.stalloc_gpu:
        _begin(config, all_tests=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [marker.partition("(")[0] for marker in MARKERS]
    if any(item.get_closest_marker(name) is not None for item in items for name in names):
        _begin(config, all_tests=False)


def _begin(config: pytest.Config, *, all_tests: bool) -> None:
    if config.pluginmanager.has_plugin("stalloc-guard"):
        return
    from stalloc.guard.guard_session import Guard

    config.pluginmanager.register(Guard(config, all_tests=all_tests), "stalloc-guard")


class _Listener:
    """Waits for the first test that was measured, in whichever process; from then on there is something to tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._summary: Any = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "stalloc", None)
        if found is not None:
            self._told().add(found, report.when, passed=report.passed)

    def _told(self) -> Any:
        if self._summary is None:
            from stalloc.guard.session_summary import SessionSummary

            self._summary = SessionSummary(self._config.option)
        return self._summary

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baseline where that is asked for, in the process that hears of all tests."""
        if self._config.option.stalloc_update and not hasattr(self._config, "workerinput"):
            self._told().update()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._summary is None and not self._config.pluginmanager.has_plugin("stalloc-guard"):
            return
        lines = self._told().lines()
        if lines:
            terminalreporter.section("GPU memory (stalloc)")
            for line in lines:
                terminalreporter.line(line)
