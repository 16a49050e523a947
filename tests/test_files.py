"""Files are written whole or not at all, beside whatever others put there; what is no file is written to as it is."""

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.files import SCRATCH_PATTERN, check_writable, whole, write_whole
from stalloc.planner import load_plans, plan, save_plans
from stalloc.trace import load_traces, save_traces
from stalloc.writers import writing

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
needs_others = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
SOMEBODY = 12345
CSV = "id,lower,upper,size\n" + "".join(f"{row},{row},{row + 20},{512 * row + 512}\n" for row in range(300))


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """A planning CSV, in a folder of its own."""
    file = tmp_path / "given" / "requests.csv"
    file.parent.mkdir()
    file.write_text(CSV)
    return file


def _run(arguments: list[str], largest: int | None = None, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process whose files cannot grow beyond `largest` bytes, as on a full disk."""
    limit = "" if largest is None else f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, -1));"
    source = f"import sys, numba; {limit} from stalloc.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": ""}
    # -B: Python would keep its own code of what it imports, cut off at that size
    return subprocess.run(
        [sys.executable, "-B", "-c", source, *arguments], env=environment, check=False, timeout=300, **options
    )  # type: ignore[call-overload]


def _save_plan(path: Path, file: Path) -> None:
    save_plans(path.with_suffix(".plan.npz"), [plan(load_traces(file)[0])])


def _save_trace(path: Path, file: Path) -> None:
    save_traces(path.with_suffix(".trace.npz"), load_traces(file))


def _save_text(path: Path, file: Path) -> None:
    writing.write_chunks(path.with_suffix(".csv"), [b"a,b\n"])


@pytest.mark.parametrize("save", [_save_plan, _save_trace, _save_text])
@pytest.mark.parametrize("scratch", [".{name}.{pid}", ".{name}.{pid}.part"])
def test_a_link_planted_at_a_name_that_can_be_guessed_leads_nowhere(
    requests: Path, tmp_path: Path, save: Callable[[Path, Path], None], scratch: str
) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    shared.mkdir()
    for suffix in (".plan.npz", ".trace.npz", ".csv"):
        (shared / scratch.format(name=f"step{suffix}", pid=os.getpid())).symlink_to(victim)
    save(shared / "step", requests)
    assert victim.read_text() == "precious"
    [written] = shared.glob("step.*")
    assert written.is_file()
    assert not written.is_symlink()


def test_one_plan_is_saved_from_four_threads_at_once(requests: Path, tmp_path: Path) -> None:
    made, path = plan(load_traces(requests)[0]), tmp_path / "out" / "step.plan.npz"
    path.parent.mkdir()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for saved in [pool.submit(save_plans, path, [made]) for _ in range(200)]:
            saved.result()
    assert load_plans(path)[0].peak_bytes == made.peak_bytes
    assert os.listdir(path.parent) == ["step.plan.npz"]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["stats", "FILE", "--json", "OUT"], "result.json"),
        pytest.param(["plan", "FILE", "--json", "OUT"], "result.json", marks=pytest.mark.slow),
        (["plan", "FILE", "-o", "OUT"], "step.plan.npz"),
        pytest.param(["plan", "FILE", "--csv", "OUT"], "step.csv", marks=pytest.mark.slow),
        (["convert", "FILE", "OUT", "--force"], "step.trace.npz"),
        pytest.param(["convert", "FILE", "OUT", "--force"], "step.pickle", marks=pytest.mark.slow),
        pytest.param(["convert", "FILE", "OUT", "--force"], "step.json", marks=pytest.mark.slow),
        pytest.param(["convert", "FILE", "OUT", "--force"], "step.csv.gz", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_leaves_what_was_there(requests: Path, tmp_path: Path, arguments: list[str], output: str) -> None:
    place = tmp_path / "out" / output
    place.parent.mkdir()
    old = '{"json_version": 1, "of": "the old one"}'
    place.write_text(old)
    command = [{"FILE": str(requests), "OUT": str(place)}.get(word, word) for word in arguments]
    done = _run(command, largest=200, capture_output=True)
    said = done.stderr.decode().splitlines()
    assert done.returncode == 2, done.stderr
    assert [line for line in said if "compiled code" not in line] == said[-1:]
    assert said[-1].startswith(f"stalloc: cannot write {place}: File too large: ")
    assert place.read_text() == old
    assert os.listdir(place.parent) == [output]


def test_a_device_that_is_full_is_one_sentence(requests: Path) -> None:
    done = run_stalloc("stats", requests, "--json", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("stalloc: cannot write /dev/full: No space left on device: choose another")


def test_standard_output_may_be_named_as_a_file(requests: Path, tmp_path: Path) -> None:
    """A pipe takes the bytes as they come; a file goes on where it is, and is still the same file."""
    table, command = tmp_path / "table.csv", ["plan", str(requests), "--json", os.devnull, "--csv"]
    assert run_stalloc(*command, table).returncode == 0
    assert _run([*command, "/dev/stdout"], capture_output=True).stdout.startswith(table.read_bytes())
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    with log.open("ab") as output:
        assert run_stalloc(*command, "/dev/stdout", stdout=output.fileno()).returncode == 0
        assert os.fstat(output.fileno()).st_ino == log.stat().st_ino
    assert log.read_bytes().startswith(b"before\n" + table.read_bytes())
    assert Path("/dev/stdout").is_symlink()
    assert Path(os.devnull).is_char_device()


def test_a_pipe_with_a_name_is_written_to(requests: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert run_stalloc("stats", requests, "--json", pipe).returncode == 0
        assert reader.stdout is not None
        assert json.loads(reader.stdout.read())["devices"]
    assert pipe.is_fifo()


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    old, fresh, kept = tmp_path / "old", tmp_path / "fresh", tmp_path / "kept"
    old.touch()
    old.chmod(0o604)
    before = os.umask(0o027)
    try:
        write_whole(old, b"new")
        write_whole(fresh, "new")
        write_whole(kept, "new", private=True)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o7777 for path in (old, fresh, kept)] == [0o604, 0o640, 0o600]
    assert [path.read_text() for path in (old, fresh, kept)] == ["new"] * 3


def _fail(output: BinaryIO, error: type[BaseException]) -> None:
    output.write(b"half of it")
    raise error


def test_whatever_ends_the_writing_early_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("the old one")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), whole(file) as output:
            _fail(output, error)
    assert file.read_text() == "the old one"
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_may_be_as_long_as_names_can_be(requests: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 246}.plan.npz"
    save_plans(path, [plan(load_traces(requests)[0])])
    assert load_plans(path)[0].num_requests == 300


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    latest, other, target = tmp_path / "latest", tmp_path / "other", tmp_path / "far" / "target"
    latest.symlink_to("other")
    other.symlink_to(target)
    write_whole(latest, "first")
    write_whole(latest, "second")
    assert target.read_text() == "second"
    assert latest.is_symlink()
    assert os.listdir(target.parent) == ["target"]
    latest.unlink()
    latest.symlink_to("latest")
    with pytest.raises(BadInputError, match=r"cannot write .*latest: Too many levels of symbolic links: name a file"):
        write_whole(latest, "third")


@needs_root
def test_a_link_that_somebody_else_planted_is_replaced(tmp_path: Path) -> None:
    planted, victim = tmp_path / "step.json", tmp_path / "victim"
    victim.write_text("precious")
    planted.symlink_to(victim)
    os.lchown(planted, SOMEBODY, SOMEBODY)
    write_whole(planted, "mine")
    assert victim.read_text() == "precious"
    assert not planted.is_symlink()
    assert planted.read_text() == "mine"


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("the old one")
    for name in ("old", "fresh"):
        check_writable(tmp_path / name)
    check_writable(os.devnull)
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "the old one"
    for place, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x", "No such file"),
        (tmp_path / "old" / "x", "Not a dir"),
    ):
        with pytest.raises(BadInputError, match=rf"cannot write {place}: {reason}.*: name a file in a folder you can"):
            check_writable(place)
        with pytest.raises(BadInputError, match=rf"cannot write {place}: {reason}.*: name a file in a folder you can"):
            write_whole(place, b"")


@needs_others
def test_a_file_that_is_protected_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("the old one")
    file.chmod(0o400)
    with pytest.raises(BadInputError, match="Permission denied"):
        write_whole(file, "the new one")
    assert file.read_text() == "the old one"


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "step.csv", "--json", "step.csv"],
        ["top", "step.csv", "--json=./step.csv"],
        ["stats", "--json", "step.csv", "other.csv"],  # typed by somebody who takes --json for a flag
        ["stats", "step.csv", "--graph", "link.csv"],
        ["report", "step.csv", "-o", "step.csv", "--format", "html"],
        ["diff", "--check", "step.csv", "--max", "1GiB", "--junit", "step.csv"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_trace_is_not_replaced_by_what_is_said_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = b"id,lower,upper,size\na,0,2,512\nb,1,3,512\n"
    for name in ("step.csv", "other.csv"):
        Path(name).write_bytes(trace)
    Path("link.csv").symlink_to("step.csv")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "name another file" in error
    assert error.count("\n") == 1
    assert Path("step.csv").read_bytes() == trace


def test_json_replaces_what_json_wrote_and_what_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.csv").write_text("id,lower,upper,size\na,0,2,512\n")
    Path("stats.json").touch()
    for _ in range(2):
        assert main(["stats", "step.csv", "--json", "stats.json"]) == 0
        assert '"json_version"' in Path("stats.json").read_text()
    with Path("log").open("w+") as log:
        log.write("before\n")
        log.flush()
        assert run_stalloc("stats", "step.csv", "--json", "/dev/stdout", stdout=log.fileno()).returncode == 0
    assert Path("log").read_text().startswith('before\n{\n  "json_version"')


def test_scratch_files_go_by_names_that_cannot_be_guessed(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with whole(tmp_path / "file"):
            seen |= {path.name for path in tmp_path.glob(SCRATCH_PATTERN)}
    assert len(seen) == 3
    assert all(len(name) > 16 for name in seen)
