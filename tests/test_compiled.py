"""Compiled code is kept for the next start, by nobody else's hand; a first use that takes long says why."""

import json
import os
import pickle
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_programs import run_compiling

pytestmark = pytest.mark.usefixtures("usual_umask")

PROGRAM = """
import json
import sys

sys.path.insert(0, sys.argv[1])
import made_up

assert made_up.double(21) == 2 * 21
assert made_up.address.ctypes(3) == 4
hits = sum(made_up.double.stats.cache_hits.values()), made_up.address.cache_hits
print(json.dumps({"hits": hits}))
"""
MADE_UP = """
from stalloc.compiled import cfunc, njit

@njit()
def double(x):
    return 2 * x

@cfunc("int64(int64)")
def address(x):
    return x + 1
"""


def _said(cache: Path, terminal: bool) -> str:
    """What a program that uses the compiled core says on its standard error."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", "import stalloc.core.requests"]
    process = subprocess.Popen(command, stderr=theirs, env={**os.environ, "NUMBA_CACHE_DIR": str(cache)})
    assert process.wait(timeout=300) == 0
    os.write(theirs, b"|")
    said = os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_first_use_that_has_to_compile_says_so_once(tmp_path: Path, terminal: bool) -> None:
    first, again = _said(tmp_path / "a", terminal), _said(tmp_path / "a", terminal)
    assert first.count("stalloc: compiling") == first.count("\n") == 1
    assert again == "|"


class Compiling:
    """A module with two compiled functions, whose code is kept in the folder that NUMBA_CACHE_DIR names."""

    def __init__(self, base: Path) -> None:
        self.sources, self.kept, self.home = base / "sources", base / "kept", base / "home"
        self.sources.mkdir()
        self.kept.mkdir(mode=0o755)
        (self.sources / "made_up.py").write_text(MADE_UP)

    def run(self, before: str = "", **variables: str) -> tuple[list[int], list[str]]:
        """How many functions were found compiled, and what was said; `before` is done before numba is imported."""
        variables = {"NUMBA_CACHE_DIR": str(self.kept), "XDG_CACHE_HOME": str(self.home), **variables}
        if not before:
            done = run_compiling(PROGRAM, self.sources, **variables)
        else:
            command = [sys.executable, "-B", "-c", before + PROGRAM, str(self.sources)]
            environment = os.environ | variables
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["hits"], done.stderr.splitlines()

    def files(self, place: Path | None = None) -> list[Path]:
        """What is kept."""
        return sorted(path for path in (place or self.kept).rglob("*") if path.is_file())


@pytest.fixture
def compiling(tmp_path: Path) -> Compiling:
    """A module with two compiled functions."""
    return Compiling(tmp_path)


class _Attack:
    """What runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


def test_compiled_code_is_kept_for_this_user_and_found_again(compiling: Compiling) -> None:
    assert compiling.run() == ([0, 0], [])
    assert compiling.run() == ([1, 1], [])
    assert len(compiling.files()) == 2
    assert {path.stat().st_mode & 0o777 for path in compiling.files()} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in compiling.files()} == {0o700}


def test_what_others_could_have_put_there_is_never_run(compiling: Compiling, tmp_path: Path) -> None:
    """The same pickles, which run a command, under the very names that are looked for."""
    compiling.run()
    for path in compiling.files():
        path.write_bytes(pickle.dumps(_Attack(tmp_path / "hacked")))
    compiling.sources.chmod(0o777)  # so that not even what lies beside the sources is used
    for weak in (compiling.files()[0].parent, compiling.kept):
        weak.chmod(0o777)
        (hits, said), (again, _) = compiling.run(), compiling.run()
        assert hits == ([0, 0] if weak != compiling.kept else [1, 1])
        assert again == [1, 1], "it is kept in the user's own cache"
        assert len(said) == 1
        assert said[0].startswith(f"stalloc: compiled code is kept elsewhere: {compiling.kept} is not used, because ")
        assert said[0].endswith(f"run chmod go-w {weak}, or name another folder in NUMBA_CACHE_DIR.")
        weak.chmod(0o755)
    assert len(compiling.files(compiling.home)) == 2
    assert not (tmp_path / "hacked").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_trusted_anywhere_means_compiling_each_time(compiling: Compiling) -> None:
    compiling.kept.chmod(0o777)
    compiling.sources.chmod(0o777)
    compiling.home.mkdir()
    compiling.home.chmod(0o777)
    for _ in range(2):
        hits, said = compiling.run()
        assert hits == [0, 0]
        assert [line.partition(":")[2].partition(":")[0].strip() for line in said] == [
            "compiled code is kept elsewhere",
            "compiled code is not kept, so every start compiles again",
        ]
    assert compiling.files() == compiling.files(compiling.home) == []


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    lambda data: data[:100] + data[101:],
    lambda data: b"\x80\x04." + data,
]


def test_damaged_compiled_code_is_compiled_anew(compiling: Compiling) -> None:
    compiling.run()
    for number, damage in enumerate(DAMAGES):
        for path in compiling.files():
            path.write_bytes(damage(path.read_bytes()))
        assert compiling.run() == ([0, 0], []), number
    assert compiling.run() == ([1, 1], [])


@pytest.mark.slow
def test_compiled_code_under_the_name_of_another_is_compiled_anew(compiling: Compiling) -> None:
    compiling.run()
    first, second = compiling.files()
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    assert compiling.run() == ([0, 0], [])


def test_files_that_others_can_write_are_compiled_anew(compiling: Compiling) -> None:
    compiling.run()
    compiling.files()[0].chmod(0o666)
    hits, said = compiling.run()
    assert (sum(hits), said) == (1, [])
    assert compiling.run() == ([1, 1], [])


def test_compiled_code_lies_beside_the_sources_unless_another_place_is_named(compiling: Compiling) -> None:
    assert compiling.run(NUMBA_CACHE_DIR="") == ([0, 0], [])
    assert compiling.run(NUMBA_CACHE_DIR="") == ([1, 1], [])
    assert len(compiling.files(compiling.sources / "__pycache__")) == 2
    compiling.sources.chmod(0o775)
    assert compiling.run(NUMBA_CACHE_DIR="") == ([0, 0], []), "nobody named that place, so that nothing is said"
    assert compiling.run(NUMBA_CACHE_DIR="") == ([1, 1], [])
    assert len(compiling.files(compiling.home)) == 2


def test_changed_sources_are_compiled_anew_and_old_code_is_removed(compiling: Compiling) -> None:
    compiling.run()
    old = compiling.files()
    (compiling.sources / "made_up.py").write_text(MADE_UP.replace("2 * x", "x + 21"))
    assert compiling.run() == ([0, 0], [])
    assert len(compiling.files()) == 2
    assert not set(old) & set(compiling.files())


@pytest.mark.slow
def test_a_full_cache_costs_one_sentence(compiling: Compiling) -> None:
    """Files cannot grow, as on a full disk."""
    full = "import resource, numba; resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))\n"
    hits, said = compiling.run(full)
    assert hits == [0, 0]
    assert len(said) == 1
    assert said[0].startswith(f"stalloc: compiled code cannot be kept in {compiling.kept}")
    assert said[0].endswith(" (File too large): the next start compiles again.")
    assert compiling.files() == []


def test_a_full_cache_does_not_make_a_trace_unreadable(compiling: Compiling, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    events = [
        {
            "ph": "i",
            "name": "[memory]",
            "ts": i,
            "args": {"Device Type": 1, "Device Id": 0, "Addr": 4096, "Bytes": size},
        }
        for i, size in enumerate((512, -512))
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    source = f"""
import resource, numba
resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
from stalloc.trace import load_traces
assert load_traces({str(trace)!r})[0].num_requests == 1
"""
    compiling.run(source)


_TIMED_OUT = """
import json, signal, sys
from numba.core import compiler
class TimedOut(Exception):
    pass
def handler(number, frame):
    raise TimedOut(number)
numbers = signal.SIGALRM, signal.SIGUSR1
for number in numbers:
    signal.signal(number, handler)
rebuild = compiler.CompileResult._rebuild
def rebuild_slowly(*arguments):
    for number in numbers:
        signal.raise_signal(number)
    return rebuild(*arguments)
sys.path.insert(0, sys.argv[1])
import made_up
compiler.CompileResult._rebuild = rebuild_slowly
heard = []
try:
    made_up.double(21)
except TimedOut as error:
    heard = [error.args[0], error.__context__.args[0]]
there = sum(made_up.double.stats.cache_hits.values()), [signal.getsignal(number) is handler for number in numbers]
print(json.dumps([heard == [signal.SIGUSR1, signal.SIGALRM], there, made_up.double(21)]))
"""


def test_a_time_out_while_compiled_code_is_loaded_reaches_the_program(compiling: Compiling) -> None:
    """numba, which takes what cannot be loaded for damaged, was to hear nothing of it, nor LLVM."""
    compiling.run()
    done = run_compiling(_TIMED_OUT, compiling.sources, NUMBA_CACHE_DIR=str(compiling.kept))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, [1, [True, True]], 42]


@pytest.mark.slow
def test_compiling_warns_of_nothing(run_fresh: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """A program may have warnings as errors; of records that it took for one another numba warned."""
    source = """
import warnings
from numba import int64
from stalloc.core import counters
warnings.simplefilter("error")
counters.reset_peaks.compile((int64,))
print(sum(counters.reset_peaks.stats.cache_misses.values()))
"""
    done = run_fresh(source, NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
