"""The pytest plugin, in sessions of its own: limits, the baseline, leaks, fixtures, xdist, child processes, CuPy."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from properties import variants
from warm_programs import run_stalloc, run_warm

from stalloc.integrations import hook

Session = Callable[..., subprocess.CompletedProcess[str]]
_IS_INSTALLED = any(point.name == "stalloc" for point in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if _IS_INSTALLED else ("-p", "stalloc.guard.pytest_plugin")

MODEL = """
import torch

def grab(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def forward(mib):
    kept = grab(mib)
    return kept, grab(1)
"""


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Run pytest on a file of tests, on a virtual H100 unless `gpu` says otherwise; checks the exit code."""
    (tmp_path / "model.py").write_text(MODEL)

    def run(
        tests: str, *options: str, code: int = 0, gpu: str | None = "virtual:H100", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(tests)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("STALLOC", "PYTEST"))}
        arguments = [*PLUGIN, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *options]
        arguments += ["--stalloc-gpu", gpu] if gpu else []
        source = "import sys, pytest; sys.path.insert(0, ''); sys.exit(pytest.main(sys.argv[1:]))"
        done = run_warm(source, *arguments, folder=tmp_path, variables=kept | {"STALLOC_CACHE": "off"} | variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def hungriest(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the end report says was allocated, by test."""
    found = re.findall(r"^ +([\d.]+ \w+)  +(?:[\d.]+ \w+|not recorded)  test_it\.py::(\S+)$", done.stdout, re.MULTILINE)
    return {name: size for size, name in found}


def shown_of(done: subprocess.CompletedProcess[str], test: str) -> list[str]:
    """The lines of a failure."""
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if re.fullmatch(rf"_+ .*{re.escape(test)} _+", line))
    ends = (number for number, line in enumerate(lines) if number > begin and re.match(r"[_=]{3,} ", line))
    return [line for line in lines[begin + 1 : next(ends)] if not line.startswith("[gw")]  # xdist names the worker


pytestmark = pytest.mark.usefixtures("cuda_torch")


def test_a_limit_fails_with_who_held_memory(session: Session, tmp_path: Path) -> None:
    done = session(
        """
import pytest
from model import forward

@pytest.mark.limit_gpu_memory("30 MiB")
@pytest.mark.parametrize("mib", [20, 40])
def test_it(mib):
    forward(mib)
""",
        code=1,
    )
    lines = shown_of(done, "test_it[40]")
    assert lines[0].endswith("41.00 MiB allocated at the peak, 11.00 MiB more than limit_gpu_memory('30 MiB')")
    assert "41.00 MiB  model.py:5 grab" in "\n".join(lines)
    assert len(lines) < 25
    assert "1 failed, 1 passed" in done.stdout
    command = re.search(r"next: stalloc top (\S+)", done.stdout)
    assert command is not None
    top = run_stalloc("top", command[1], folder=tmp_path)
    assert "allocated 41.00 MiB by 2 requests" in top.stdout
    assert hungriest(done) == {"test_it[40]": "41.00 MiB", "test_it[20]": "21.00 MiB"}


def test_call_sites_are_told_by_their_path_below_the_root(session: Session, tmp_path: Path) -> None:
    for package in ("first", "second"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "model.py").write_text(MODEL)
    tests = "import pytest, first.model, second.model\n@pytest.mark.limit_gpu_memory('1 MiB')\ndef test_it():\n"
    shown = "\n".join(shown_of(session(tests + "    first.model.grab(2), second.model.grab(3)", code=1), "test_it"))
    assert "2.00 MiB  first/model.py:5 grab" in shown
    assert "3.00 MiB  second/model.py:5 grab" in shown


def test_a_limit_that_is_no_size_is_one_sentence(session: Session) -> None:
    tests = "import pytest\n@pytest.mark.limit_gpu_memory('much')\ndef test_it(): pass"
    assert shown_of(session(tests, code=1), "test_it") == [
        "stalloc: 'much' is not an amount of memory: write bytes, or a number with MiB, GiB, MB or GB."
    ]


BASELINE_TESTS = """
import pytest
from model import forward

@pytest.mark.parametrize("mib", [1, 8])
def test_it(mib):
    forward(mib * {factor})

def test_new():
    forward(2)
"""


@pytest.mark.slow
def test_workers_write_one_baseline_and_are_held_to_it(session: Session, tmp_path: Path) -> None:
    options = ("--stalloc-baseline", "memory.json", "-n", "2")
    wrote = session(BASELINE_TESTS.format(factor=1), *options, "--stalloc-update")
    assert "wrote 3 tests to memory.json" in wrote.stdout
    assert len(json.loads((tmp_path / "memory.json").read_text())["entries"]) == 3
    grown = session(BASELINE_TESTS.format(factor=2), *options, code=1)
    assert "8.00 MiB more than the baseline's 9.00 MiB" in shown_of(grown, "test_it[8]")[0]


def test_a_baseline_is_written_kept_and_what_grew_is_told(session: Session, tmp_path: Path) -> None:
    options = ("--stalloc-baseline", "memory.json")
    missing = session(BASELINE_TESTS.format(factor=1), *options, code=4)
    assert "memory.json does not exist" in missing.stderr + missing.stdout
    wrote = session(BASELINE_TESTS.format(factor=1), *options, "--stalloc-update", "-k", "not new")
    assert "wrote 2 tests to memory.json" in wrote.stdout
    first = (tmp_path / "memory.json").read_bytes()
    session(BASELINE_TESTS.format(factor=1), *options, "--stalloc-update", "-k", "not new")
    assert (tmp_path / "memory.json").read_bytes() == first
    same = session(BASELINE_TESTS.format(factor=1), *options)
    assert "warning" not in same.stdout.lower()
    assert "1 test not in the baseline" in same.stdout
    # the line moves, as edits make it do
    (tmp_path / "model.py").write_text(MODEL.replace("return torch", "# a remark\n    return torch"))
    grown = session(BASELINE_TESTS.format(factor=2), *options, code=1)
    lines = shown_of(grown, "test_it[8]")
    assert lines[0].endswith(
        "17.00 MiB allocated at the peak, 8.00 MiB more than the baseline's 9.00 MiB (tolerance 5%)"
    )
    row = next(line for line in lines if "model.py:6 grab" in line)
    assert row.split()[:6] == ["8.00", "MiB", "9.00", "MiB", "17.00", "MiB"]
    assert any(line.split()[-1] in ("transient", "scoped") for line in lines)
    assert len(lines) < 25
    session(BASELINE_TESTS.format(factor=2), *options, "--stalloc-tolerance", "20MiB")
    session(BASELINE_TESTS.format(factor=2), *options, "--stalloc-update")
    entries = json.loads((tmp_path / "memory.json").read_text())["entries"]
    assert {name.partition("::")[2]: entry["allocated_peak_bytes"] >> 20 for name, entry in entries.items()} == {
        "test_it[1]": 3,
        "test_it[8]": 17,
        "test_new": 3,
    }
    less = session(BASELINE_TESTS.format(factor=1), *options)
    assert "2 tests need less than the baseline has" in less.stdout


@variants("content", ['{"format": "stalloc baseline 1", "entries": {"a": {}}}', "", "[]"])
def test_a_damaged_baseline_is_one_sentence(session: Session, tmp_path: Path, content: str) -> None:
    (tmp_path / "memory.json").write_text(content)
    done = session("def test_it(): pass", "--stalloc-baseline", "memory.json", code=4)
    assert re.search(r"^ERROR: .*memory\.json", done.stderr, re.MULTILINE), done.stderr


FIXTURES = """
import pytest
from model import grab

@pytest.fixture(scope="module")
def model():
    grab(100)  # only while it is made
    return grab(10)

@pytest.fixture
def batch():
    return grab(4)

def test_first(model, batch): grab(3)
def test_second(model): grab(5)
def test_third(model): pass
def test_without(): grab(2)
"""


@variants("which", [("-k", "second or third"), ()])
def test_what_a_fixture_holds_counts_for_those_who_use_it(session: Session, which: tuple[str, ...]) -> None:
    found = hungriest(session(FIXTURES, "--stalloc", *which))
    alone = {
        "test_first": "17.00 MiB",
        "test_second": "15.00 MiB",
        "test_third": "10.00 MiB",
        "test_without": "2.00 MiB",
    }
    assert found == {name: size for name, size in alone.items() if name in found}
    assert len(found) == (2 if which else 4)


def test_what_is_left_is_a_leak_and_nobody_elses(session: Session) -> None:
    done = session(
        """
import pytest, torch
from model import grab
kept = []

@pytest.fixture
def batch(): return grab(4)

def test_leak(batch): kept.append(grab(7))
def test_next(batch): grab(1)
def test_product():
    a = torch.zeros(512, 512, device="cuda")
    a @ a  # cuBLAS keeps a workspace
@pytest.mark.limit_gpu_leaks("8 MiB")
def test_allowed(): kept.append(grab(7))
""",
        "--stalloc-leaks",
        code=1,
    )
    assert re.search(r"\b4 passed,.* 1 error\b", done.stdout), done.stdout
    lines = shown_of(done, "test_leak")
    assert lines[0] == "stalloc: 7.00 MiB allocated in the test are not freed after it"
    assert lines[2].split() == ["7.00", "MiB", "model.py:5", "grab"]
    assert hungriest(done)["test_next"] == "5.00 MiB"


def test_a_test_that_runs_out_of_memory_says_who_held_it(session: Session) -> None:
    done = session(
        "from model import grab\ndef test_it():\n    held = grab(30)\n    grab(64)\n",
        code=1,
        gpu="virtual:64MiB",
    )
    lines = shown_of(done, "test_it")
    assert any("OutOfMemoryError" in line for line in lines)
    assert "stalloc: out of memory; at the peak 30.00 MiB were allocated" in lines
    assert any(line.endswith("30.00 MiB  model.py:5 grab") for line in lines)


def test_without_torch_nothing_is_measured_and_that_is_said(session: Session, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    tests = """
import pytest
@pytest.mark.limit_gpu_memory("1 MiB")
def test_it():
    with pytest.raises(ImportError):
        import torch
"""
    done = session(tests, gpu=None)
    assert "no test allocated GPU memory: without a GPU, --stalloc-gpu virtual:H100 stands in for one" in done.stdout


def test_too_late_for_the_virtual_gpu_is_one_sentence(session: Session, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import torch")
    done = session("def test_it(): pass", "-p", "early", code=4)
    assert "ERROR: --stalloc-gpu virtual:H100 came too late: torch was imported before pytest" in done.stderr
    unknown = session("def test_it(): pass", gpu="virtual:H1000", code=4)
    assert "H1000" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_without_marker_and_option_nothing_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import sys
def test_it():
    heavy = {"stalloc.trace", "stalloc.device", "stalloc.integrations", "numpy", "numba", "torch"}
    assert "stalloc.guard.pytest_plugin" in sys.modules
    assert heavy & set(sys.modules) == set()
    assert {name for name in sys.modules if name.startswith("stalloc.guard.")} == {"stalloc.guard.pytest_plugin"}

def test_modules_of_stalloc_are_loaded_as_ever():
    import stalloc.cli
    assert "rewrite" not in type(stalloc.cli.__spec__.loader).__module__
    assert "diff" in stalloc.cli.build_parser(None).format_help()
""")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        *PLUGIN,
        "-p",
        "no:xdist",
        "-p",
        "no:hypothesispytest",
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU memory" not in done.stdout


@pytest.mark.usefixtures("cupy_installed")
def test_requests_of_cupy_count_alike(session: Session) -> None:
    done = session(
        """
import cupy, pytest
from model import grab

def arrays(): return cupy.empty(20 << 20, cupy.uint8)

@pytest.mark.limit_gpu_memory("25 MiB")
def test_alone():
    held = arrays()
    more = arrays()

def test_both():
    held = arrays()
    grab(9)

def test_one_after_the_other():
    held = arrays()
    del held
    grab(9)

@pytest.mark.limit_gpu_leaks
def test_leak():
    global kept
    kept = arrays()
""",
        "--stalloc",
        code=1,
    )
    assert "4 passed" not in done.stdout
    assert "40.00 MiB  test_it.py:5 arrays" in "\n".join(shown_of(done, "test_alone"))
    assert shown_of(done, "test_leak")[0].startswith("stalloc: 20.00 MiB allocated in the test")
    figures = hungriest(done)
    assert (figures["test_both"], figures["test_one_after_the_other"]) == ("29.00 MiB", "20.00 MiB")


@pytest.mark.slow
def test_child_processes_count(tmp_path: Path) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "python")
    packages = next((tmp_path / "python").glob("lib/python*/site-packages"))
    folders = [place for place in sys.path if place.endswith("-packages")]
    (packages / "environment.pth").write_text("".join(f"import site; site.addsitedir({at!r})\n" for at in folders))
    hook.place(packages)
    (tmp_path / "test_it.py").write_text("""
import subprocess, sys
PROGRAM = "import torch; x = torch.empty(33 << 20, dtype=torch.uint8, device='cuda')"
def test_it(): subprocess.run([sys.executable, "-c", PROGRAM], check=True)
""")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STALLOC", "PYTEST"))}
    command = [
        tmp_path / "python/bin/python",
        "-P",
        "-m",
        "pytest",
        *PLUGIN,
        "--stalloc-gpu",
        "virtual:H100",
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hungriest(done) == {"test_it": "33.00 MiB"}
