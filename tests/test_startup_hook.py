"""The hook itself: wheels carry it, it can be placed by hand, and whatever the variables hold the program runs."""

import subprocess
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import stalloc
from stalloc.allocator_conf import VARIABLES, conf_in_force
from stalloc.integrations import build_backend, hook, torch_conf

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_settings_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert conf_in_force() == ("", {})
    assert torch_conf.report(None) == ""
    text = "roundup_power2_divisions:[256:1,512:2,>:4], max_split_size_mb:128"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    variable, found = conf_in_force()
    assert variable == "PYTORCH_CUDA_ALLOC_CONF"
    assert found == {"roundup_power2_divisions": "[256:1,512:2,>:4]", "max_split_size_mb": "128"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.5")
    assert conf_in_force()[0] == "PYTORCH_ALLOC_CONF", "torch prefers the new name"


def test_wheels_carry_the_hook_and_own_it(tmp_path: Path) -> None:
    wheel = tmp_path / "made-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made/__init__.py", "")
        archive.writestr("made-1.dist-info/RECORD", "made/__init__.py,,\nmade-1.dist-info/RECORD,,\n")
    build_backend.add_files(wheel, {hook.FILE_NAME: hook.LINE.encode()})
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert archive.read(hook.FILE_NAME).decode() == hook.LINE
        assert len(archive.namelist()) == len(set(archive.namelist())) == 3
        record = archive.read("made-1.dist-info/RECORD").decode().splitlines()
    assert record[0].startswith(f"{hook.FILE_NAME},sha256=")
    assert len(record) == 3


def test_a_wheel_without_what_compiling_needs_stays_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "made-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("stalloc/__init__.py", "raise ImportError('no verbs here')")
    before = wheel.read_bytes()
    assert build_backend.add_compiled_code(wheel) == wheel
    assert wheel.read_bytes() == before
    assert "stalloc: the wheel comes without compiled code: " in capfd.readouterr().err


def test_the_hook_can_be_placed_and_removed_by_hand(tmp_path: Path) -> None:
    assert hook.place(tmp_path).read_text() == hook.LINE
    assert not hook.remove(tmp_path).exists()
    hook.remove(tmp_path)
    with pytest.raises(RuntimeError, match="cannot write"):
        hook.place(tmp_path / "missing")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a Python that has the hook and, unless `there` is False, stalloc, but no other package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    hook.place(packages)

    def run(*arguments: str, there: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        (packages / "checkout.pth").write_text(f"{Path(stalloc.__file__).parents[1]}\n" if there else "")
        command = [str(folder / "bin" / "python"), "-B", *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

    return run


_LOADED = "import sys; print(sorted(name for name in sys.modules if name.startswith('stalloc')))"


@pytest.mark.parametrize("value", ["1", "yes", "virtual"])
@pytest.mark.parametrize("isolated", ["-I", "-E"])
def test_a_python_that_is_to_ignore_the_environment_is_left_alone(bare: Run, isolated: str, value: str) -> None:
    done = bare(isolated, "-c", _LOADED, STALLOC=value, STALLOC_DEVICE="virtual")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert "stalloc" in bare("-c", _LOADED, STALLOC=value).stdout, "else it is loaded"


def test_a_hook_whose_stalloc_is_gone_is_one_sentence(bare: Run) -> None:
    done = bare("-c", "print(1)", there=False, STALLOC="1")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == (
        "stalloc: it cannot be loaded (ModuleNotFoundError(\"No module named 'stalloc'\")): install it again, or unset "
        "STALLOC.\n"
    )
    quiet = bare("-c", "print(1)", there=False, STALLOC="0")
    assert (quiet.stdout, quiet.stderr) == ("1\n", "")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_sentence_that_cannot_be_said_stops_nothing(bare: Run, redirection: str, there: bool) -> None:
    interpreter = bare("-c", "import sys; print(sys.executable)").stdout.strip()
    bare("-c", "", there=there)
    command = ["sh", "-c", f"{interpreter} -B -c 'print(1)' {redirection}"]
    done = subprocess.run(command, env={"STALLOC": "yes"}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")


_ODD = (
    "",
    " ",
    "\n",
    "1\n2",
    "\udcff\udc80",
    "\x1b[31m",
    "\u202e",
    "²",
    "-1",
    "9" * 5000,
    "None",
    "{pid}" * 1000,
    "/" * 5000,
)


_ODD_DEVICES = (
    "virtual:99999999999999999999x1GiB",
    "virtual:0x1GiB",
    "virtual:-1x1GiB",
    "virtual:2x",
    "virtual:x1GiB",
    "virtual:65x1GiB",
    f"virtual:{'9' * 5000}x1GiB",
    f"virtual:{'9' * 400}GiB",
    f"virtual:{'9' * 5000}",
    "virtual:99999999999999999999GiB",
    "virtual:0GiB",
    "virtual:1.5.5GiB",
    "virtual:²GiB",
    "virtual:\n",
    "virtual:\udcff",
    "virtual:" + "x" * 50_000,
    "auto:A100-80GB",
)


_ODD_STREAMS = ("weigh:²", "share" + "9" * 5000, "share:1")


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("STALLOC", _ODD),
        ("STALLOC_DEVICE", (*_ODD, *_ODD_DEVICES)),
        ("STALLOC_STREAMS", (*_ODD, *_ODD_STREAMS)),
        ("STALLOC_ARENA", _ODD),
    ],
)
def test_whatever_a_variable_holds_the_program_runs(bare: Run, variable: str, values: tuple[str, ...]) -> None:
    """What cannot be meant is one line that names it; a value that only matters later is not looked at."""
    for value in values:
        done = bare("-c", "print(1)", **{"STALLOC": "1", variable: value})
        assert (done.returncode, done.stdout) == (0, "1\n"), value[:80]
        if (variable, value) == ("STALLOC", ""):
            assert done.stderr == ""
            continue
        [line] = done.stderr.splitlines()
        assert line.startswith("stalloc: "), value[:80]
        assert line.endswith(" The program goes on without stalloc.")
        assert "Error" not in line
        assert line.isprintable()
        assert len(line) < 400
