"""Building the virtual GPU: once per user, by any C compiler, and a clear sentence where there is none."""

import concurrent.futures
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from stalloc.device.elf import ElfFile
from stalloc.device.virtual_build import MAIN_LIBRARY, compiler

pytestmark = pytest.mark.usefixtures("usual_umask")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")

_BUILD = """
from stalloc.device.virtual_build import build, built_directory, cache_directory
before = built_directory()
print(before, build(), built_directory(), cache_directory(), sep="\\n")
"""


@needs_compiler
def test_build_is_kept_and_found_again(run_program, built_once):
    before, built, after, cache = built_once.said
    assert before == "None"
    assert built == after
    assert Path(built).parent == Path(cache) == built_once.cache / "stalloc" / "virtual-gpu"
    written = (Path(built) / MAIN_LIBRARY).stat().st_mtime_ns
    second = run_program(_BUILD, XDG_CACHE_HOME=str(built_once.cache))
    assert second.stdout.splitlines()[:2] == [built, built]
    assert (Path(built) / MAIN_LIBRARY).stat().st_mtime_ns == written


@pytest.mark.slow
@needs_compiler
def test_two_processes_may_build_at_once(run_program, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: run_program(_BUILD, XDG_CACHE_HOME=str(tmp_path)), range(2)))
    assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    assert runs[0].stdout.splitlines()[1] == runs[1].stdout.splitlines()[1]
    assert len(list((tmp_path / "stalloc" / "virtual-gpu").iterdir())) == 1


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"CC": None, "PATH": ""}, "none of cc, gcc and clang is there: install gcc, or set CC to a compiler."),
        ({"CC": "no-such-compiler -O2"}, "CC=no-such-compiler -O2 is not there: install gcc, or set CC to a compiler."),
        ({"CC": "false"}, "the virtual GPU could not be built: compiling it failed"),
    ],
)
def test_no_compiler_is_one_clear_sentence(run_program, tmp_path, environment, sentence):
    done = run_program(_BUILD, XDG_CACHE_HOME=str(tmp_path), **environment)
    assert "SetupError: the virtual GPU" in done.stderr
    assert sentence in done.stderr.splitlines()[-1]


@pytest.mark.slow
@needs_compiler
def test_where_there_is_no_cache_a_process_builds_for_itself_and_says_so_once(run_program, tmp_path):
    (tmp_path / "stalloc").write_text("a file where the directory should be")
    (tmp_path / "scratch").mkdir()
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path / "scratch")}
    done = run_program(_BUILD + "build()", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert "so every process builds it: name a writable XDG_CACHE_HOME." in done.stderr
    assert list((tmp_path / "scratch").iterdir()) == [], "it is gone with the process"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", [name for name in ("gcc", "clang") if shutil.which(name)])
def test_sources_compile_without_a_warning(name, tmp_path):
    for source in sorted((Path(__file__).parents[1] / "stalloc" / "device").glob("*.c")):
        command = [name, "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-O2", "-fPIC"]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(tmp_path / "x.o")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@needs_compiler
def test_elf_reader_finds_what_a_library_defines_and_needs(tmp_path):
    command = compiler()
    assert command is not None
    (tmp_path / "inner.c").write_text("int inner(void) { return 1; }")
    (tmp_path / "inner.map").write_text("INNER_1.0 { global: inner; };")
    (tmp_path / "outer.c").write_text(
        "int inner(void); int missing(void);\nstatic int hidden(int x) { return x * missing(); }\n"
        "int outer(int x) { return inner() + hidden(x); }"
    )
    shared = [*command, "-shared", "-fPIC", "-O0"]
    inner = ["-Wl,-soname,libinner.so.1", f"-Wl,--version-script={tmp_path}/inner.map"]
    subprocess.run([*shared, *inner, "-o", f"{tmp_path}/libinner.so", f"{tmp_path}/inner.c"], check=True)
    outer = [f"{tmp_path}/outer.c", f"-L{tmp_path}", "-linner"]
    subprocess.run([*shared, "-o", f"{tmp_path}/libouter.so", *outer], check=True)
    with ElfFile(tmp_path / "libouter.so") as elf:
        assert "libinner.so.1" in elf.needed_libraries()
        assert ("INNER_1.0", "libinner.so.1") in elf.needed_versions().values()
        required = {requirement.name: requirement for requirement in elf.requirements()}
        assert (required["inner"].version, required["inner"].library) == ("INNER_1.0", "libinner.so.1")
        assert required["missing"].library is None
        assert "outer" not in required
        functions = elf.functions((b"outer", b"hidd"))
    assert set(functions) == {"outer", "hidden"}
    assert all(function.offset_bytes > 0 and function.size_bytes > 0 for function in functions.values())


def test_elf_reader_has_empty_answers_for_other_files(tmp_path):
    (tmp_path / "text.so").write_text("not a library at all, but long enough to look at")
    with ElfFile(tmp_path / "text.so") as elf:
        assert elf.needed_libraries() == []
        assert elf.requirements() == []
        assert elf.functions((b"",)) == {}


_ACTIVATE = "from stalloc import device; print(device.activate('virtual'))"


def _activation_error(run_program, cache):
    """The sentence with which the virtual GPU refuses to come."""
    done = run_program(_ACTIVATE, XDG_CACHE_HOME=str(cache))
    assert done.returncode == 1
    error, _, sentence = done.stderr.splitlines()[-1].partition(": ")
    assert error == "stalloc.errors.SetupError"
    return sentence


class Built(NamedTuple):
    """A cache with a finished build in it, and what the process said that built it."""

    cache: Path
    said: list[str]


@pytest.fixture(scope="module")
def built_once(run_program, tmp_path_factory):
    """A build made under the umask 0, in a cache where two killed ones had left something."""
    cache = tmp_path_factory.mktemp("built") / "cache"
    folder = cache / "stalloc" / "virtual-gpu"
    for left in ("building-old1", "building-new1"):
        (folder / left).mkdir(parents=True)
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o755)
    (folder / "building-old1" / "stubs.c").write_text("")
    two_days_ago = time.time() - 48 * 3600
    os.utime(folder / "building-old1", (two_days_ago, two_days_ago))
    done = run_program("import os; os.umask(0)\n" + _BUILD, XDG_CACHE_HOME=str(cache))
    assert done.returncode == 0, done.stderr
    return Built(cache, done.stdout.splitlines())


@pytest.fixture
def built(built_once, tmp_path):
    """A cache of the test's own with a finished build in it: the folder of the build."""
    shutil.copytree(built_once.cache, tmp_path / "cache")
    (tmp_path / "cache" / "stalloc" / "virtual-gpu" / "building-new1").rmdir()
    (folder,) = (tmp_path / "cache" / "stalloc" / "virtual-gpu").iterdir()
    return folder


@needs_compiler
def test_a_folder_that_others_can_write_to_is_refused(run_program, built, tmp_path):
    for weak in (built, built.parent, tmp_path / "cache"):
        mode = weak.stat().st_mode & 0o7777
        weak.chmod(0o777)
        assert _activation_error(run_program, tmp_path / "cache").endswith(
            f" is not used, because everybody can write to {weak}: run chmod go-w {weak}, or set XDG_CACHE_HOME to "
            "another directory."
        )
        weak.chmod(mode)
    built.rename(built.with_name("aside"))
    (tmp_path / "cache").chmod(0o777)
    assert "is not used" in _activation_error(run_program, tmp_path / "cache")
    assert os.listdir(built.parent) == ["aside"], "nothing is built there either"


@needs_compiler
def test_only_libraries_that_were_built_are_loaded_and_only_if_nobody_else_could_write_them(
    run_program, built, tmp_path
):
    command, source, marker = compiler(), tmp_path / "evil.c", tmp_path / "hacked"
    assert command is not None
    source.write_text(
        '#include <stdlib.h>\n__attribute__((constructor)) static void act(void) { if (system("touch '
        + str(marker)
        + '")) abort(); }'
    )
    for name in ("libevil.so.1", "libcudnn.so.999"):
        subprocess.run([*command, "-shared", "-fPIC", "-o", str(built / name), str(source)], check=True)
    done = run_program(_ACTIVATE, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.stdout == "virtual\n", done.stderr
    library = built / "libcuda.so.1"
    library.chmod(0o777)
    refusal = f"{library} is not used, because everybody can write to {library}: remove it."
    assert _activation_error(run_program, tmp_path / "cache") == refusal
    library.unlink()
    library.symlink_to("libevil.so.1")
    refusal = f"{library} is not used, because it is no regular file: remove it."
    assert _activation_error(run_program, tmp_path / "cache") == refusal
    library.unlink()
    assert _activation_error(run_program, tmp_path / "cache") == (
        f"the virtual GPU is not whole ({library} is missing): remove {built}."
    )
    assert not marker.exists()


@needs_compiler
def test_a_build_can_be_used_whatever_the_umask_and_clears_away_what_killed_ones_left(run_program, built_once):
    """It was made under the umask 0, beside what two killed ones had left, one of them long ago."""
    _, built, _, folder = built_once.said
    assert sorted(os.listdir(folder)) == sorted(["building-new1", Path(built).name])
    assert run_program(_ACTIVATE, XDG_CACHE_HOME=str(built_once.cache)).stdout == "virtual\n"
