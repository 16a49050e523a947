"""What tests share: which of them need strangers' data, and running a program in a fresh interpreter."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import shared_folder
from warm_programs import run_warm, without_compiling

# what tests start would compile each module anew, in every process
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell: what tests start would too
    signal.signal(signal.SIGINT, signal.default_int_handler)


_BEGAN = time.monotonic()
#: files of which a test may take a minute: they come first, so that at the end no worker waits long for another
_LONG = ("test_gpu_check", "test_bench_verbs", "test_compiled_sources", "test_order", "test_docs", "test_shard_ranks")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lets a run be as long as there is time."""
    text = "begin no test after so many minutes: those that are left are skipped"
    parser.addoption("--minutes", type=float, default=float("inf"), help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Compiles what most tests need once, before there are workers, each of which would at its first import."""
    is_worker, is_whole = hasattr(config, "workerinput"), config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not is_worker and not config.option.collectonly and not config.getoption("lf"):
        subprocess.run([sys.executable, "-P", "-m", "stalloc.cli.precompile"], check=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what there is no time for."""
    if time.monotonic() - _BEGAN > 60 * item.config.getoption("minutes"):
        pytest.skip("no time is left for it (--minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is about strangers' data alone, if absent (our recordings are asked the same); sorts the rest."""
    lacking = {name for name in ("traces", "instances", "field") if shared_folder(name) is None}
    left_out = [item for item in items if lacking & {name.removeprefix("shared_") for name in item.fixturenames}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.stem not in _LONG)


@pytest.fixture(scope="session")
def shared_traces() -> Path | None:
    """The directory of strangers' recordings; a test that uses it is left out where it is absent."""
    return shared_folder("traces")


@pytest.fixture(scope="session")
def shared_instances() -> Path | None:
    """The directory of published packing instances; a test that uses it is left out where it is absent."""
    return shared_folder("instances")


@pytest.fixture(scope="session")
def shared_field() -> Path | None:
    """The directory of inputs that strangers had; a test that uses it is left out where it is absent."""
    return shared_folder("field")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What went to standard error since the last look, without what is said of compiling."""

    def look() -> str:
        return without_compiling(capsys.readouterr().err)

    return look


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """What the test makes can be written by its user alone, whatever the habits of the machine."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def _package_file(package: str, path: str) -> bool:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return bool(places) and (Path(next(iter(places))) / path).exists()


@pytest.fixture(scope="session")
def cuda_torch() -> None:
    """Skips the test unless a CUDA build of torch is installed; nothing is imported."""
    if not _package_file("torch", "lib/libtorch_cuda.so"):
        pytest.skip("no CUDA build of torch is installed")


@pytest.fixture(scope="session")
def cupy_installed() -> None:
    """Skips the test unless CuPy is installed; nothing is imported."""
    if not _package_file("cupy", "__init__.py"):
        pytest.skip("CuPy is not installed")


@pytest.fixture(scope="session")
def run_fresh() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in an interpreter that has done nothing yet: for what happens at its start and at imports.

    `run_fresh(source, *arguments, **environment)` returns the finished process; a variable given as None is unset.
    """

    def run(source: str, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", source, *arguments]
        variables = _variables(environment)
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300, check=False)
        done.stderr = without_compiling(done.stderr)
        return done

    return run


#: variables that stalloc, torch and CuPy look up when they are used; torch's backend is chosen when it is loaded
_READ_LATE = re.compile(
    "STALLOC[_=]|PYTORCH_(CUDA_)?ALLOC_CONF=(?!.*backend:)|CUPY_GPU_MEMORY_LIMIT=|CUDA_VISIBLE_DEVICES=|NO_COLOR=|MEMORY="
)


@pytest.fixture(scope="session")
def run_program(
    run_fresh: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in a process of its own, as `run_fresh` does, without paying for its start and its imports.

    A process can choose its devices only once, hence one for each program. Where a variable is given that may be read
    before the program begins, it is a fresh interpreter after all.
    """

    def run(source: str, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        if not all(_READ_LATE.match(f"{name}={value}") for name, value in environment.items()):
            return run_fresh(source, *arguments, **environment)
        return run_warm(source, *arguments, variables=_variables(environment))

    return run


def _variables(changed: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (os.environ | changed).items() if value is not None}


@pytest.fixture(scope="session")
def run_checks(run_program: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., dict[str, Any]]:
    """Run a program whose last line of output is a JSON object, and return that; a failure shows what it printed."""

    def run(source: str, *arguments: str, **environment: str | None) -> dict[str, Any]:
        done = run_program(source, *arguments, **environment)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
