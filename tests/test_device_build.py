"""Building the virtual GPU: once per user, by any C compiler, and a clear sentence where there is none."""

import concurrent.futures
import shutil
import subprocess
from pathlib import Path

import pytest

from stalloc.device.elf import ElfFile
from stalloc.device.virtual_build import MAIN_LIBRARY, compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")

_BUILD = """
from stalloc.device.virtual_build import build, built_directory, cache_directory
before = built_directory()
print(before, build(), built_directory(), cache_directory(), sep="\\n")
"""


@needs_compiler
def test_build_is_kept_and_found_again(run_program, tmp_path):
    first = run_program(_BUILD, XDG_CACHE_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    before, built, after, cache = first.stdout.splitlines()
    assert before == "None"
    assert built == after
    assert Path(built).parent == Path(cache) == tmp_path / "stalloc" / "virtual-gpu"
    written = (Path(built) / MAIN_LIBRARY).stat().st_mtime_ns
    second = run_program(_BUILD, XDG_CACHE_HOME=str(tmp_path))
    assert second.stdout.splitlines()[:2] == [built, built]
    assert (Path(built) / MAIN_LIBRARY).stat().st_mtime_ns == written
    assert [path.name for path in Path(cache).iterdir()] == [Path(built).name]


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


@needs_compiler
def test_unwritable_cache_is_one_clear_sentence(run_program, tmp_path):
    (tmp_path / "stalloc").write_text("a file where the directory should be")
    done = run_program(_BUILD, XDG_CACHE_HOME=str(tmp_path))
    assert "set XDG_CACHE_HOME to a writable directory." in done.stderr.splitlines()[-1]


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
