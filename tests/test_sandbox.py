"""A program on the virtual GPU changes no file of the user's: whole trees are hashed before and after."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from properties import variants
from warm_programs import run_stalloc, run_warm

from stalloc.sandbox import way
from stalloc.sandbox.landlock import version

PROGRAMS = Path(__file__).parent / "programs"
WRITES = PROGRAMS / "writes.py"
ORDINARY = 1234
pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")
needs_layer = pytest.mark.skipif(way().kind != "overlay", reason="this machine allows no layer (no mount namespaces)")
needs_landlock = pytest.mark.skipif(version() == 0, reason="this kernel has no Landlock")

#: resumes if there is something to resume, saves in each step, keeps the last two, and writes to a folder elsewhere
RESUMES = """
import os, sys
from pathlib import Path
import torch
elsewhere = Path(sys.argv[1])
batch = int(sys.argv[2]) if len(sys.argv) > 2 else 64
blocks = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)])
model = torch.nn.Sequential(blocks, torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters())
state = Path("last.pt").read_bytes()
assert state == b"real", state
for step in range(3):
    model(torch.randn(batch, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "part.pt")
    os.replace("part.pt", "last.pt")
    torch.save(model.state_dict(), elsewhere / f"step-{step}.pt")
    for old in sorted(elsewhere.glob("step-*.pt"))[:-2]:
        old.unlink()
Path("runs/a").mkdir(parents=True)
Path("runs/a/log").write_text("loss 0.0")
"""


def tree(*folders: Path) -> list[tuple[Any, ...]]:
    """All that a program could change, of everything below some folders."""
    found: list[tuple[Any, ...]] = []
    for top in folders:
        for folder, names, files in os.walk(top):
            for name in [".", *names, *files]:
                path = os.path.join(folder, name)
                status = os.lstat(path)
                content: Any = os.readlink(path) if os.path.islink(path) else ""
                if os.path.isfile(path) and not os.path.islink(path):
                    content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                owner = (status.st_uid, status.st_gid, status.st_mode)
                found.append((path, *owner, status.st_nlink, status.st_ino, status.st_mtime_ns, content))
    return sorted(found)


def files_of(found: list[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """A tree without its folders, whose times change when something is added."""
    return {row[0]: row for row in found if not os.path.isdir(row[0]) or os.path.islink(row[0])}


def run(words: Sequence[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command there."""
    texts = [str(word) for word in words]
    environment = os.environ | variables
    return subprocess.run(texts, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def stalloc(*words: object) -> list[object]:
    return [sys.executable, "-P", "-m", "stalloc", *words]


def warm(words: Sequence[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of stalloc there, as what is started anew would."""
    return run_stalloc(*words, folder=folder, variables=os.environ | variables)


def refused(what: str, words: Sequence[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of stalloc there, where the kernel refuses "namespaces", or "all" that protects files."""
    source = (
        f"import sys\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport refusing_kernel\n"
        f"refusing_kernel.refuse_all_or_namespaces({what!r})\ndel sys.path[0]\n"
        "from stalloc.sandbox import ways\nways.way.cache_clear()\n"  # the warm interpreter has found out before
        "from stalloc.cli import main\nsys.exit(main())"
    )
    return run_warm(source, *words, folder=folder, variables=os.environ | variables)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    """A program's folder and one elsewhere, with a program that resumes."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "train.py").write_text(RESUMES)
    (folder / "last.pt").write_bytes(b"real")
    for number in range(2):
        (elsewhere / f"step-{number}.pt").write_bytes(b"real")
    return folder, elsewhere


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in shared memory that a program's case makes."""
    path = Path("/dev/shm") / f"stalloc-test-{uuid.uuid4().hex}"
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def prepared(folder: Path, shared: Path, user: Sequence[str] = ()) -> None:
    done = run([*user, sys.executable, WRITES, "prepare"], folder, SHARED_FOLDER=str(shared))
    assert done.returncode == 0, done.stderr


def failed_cases(done: subprocess.CompletedProcess[str]) -> list[str]:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    found: list[str] = json.loads(line.removeprefix("FAILED "))
    return found


@needs_layer
@variants("verb", ["dryrun", "find", "ranks", "fit"])
def test_no_file_is_changed_by_a_program_that_is_tried(verb: str, place: tuple[Path, Path], tmp_path: Path) -> None:
    folder, elsewhere = place
    before = tree(folder, elsewhere)
    result = tmp_path / "result.json"
    options = {
        "dryrun": ["dryrun"],
        "find": ["dryrun", "--find", "batch=64..65", "--jobs", "1"],
        "ranks": ["dryrun", "--ranks", "2", "--rank", "0"],
        "fit": ["fit", "--budget", "1GiB", "--output", tmp_path / "kept.fit.npz"],
    }[verb]
    words = [elsewhere, "{batch}"] if verb == "find" else [elsewhere]
    done = warm([*options, "--json", result, "train.py", *words], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(folder, elsewhere) == before
    told = json.loads(result.read_text())["files"]
    assert told["way"] == "overlay"
    assert {"last.pt"} <= set(told["discarded"]["names"])
    assert f"{elsewhere}/step-2.pt" in told["discarded"]["names"]
    assert told["kept"]["files"] == 0
    assert "discarded: " in done.stdout
    assert "last.pt" in done.stdout
    if verb != "fit":  # which stops it after its last step
        assert "runs/" in told["discarded"]["names"]
        assert told["removals"]["names"] == [f"{elsewhere}/step-0.pt"]


@pytest.mark.slow
@needs_layer
def test_a_fit_that_a_run_makes_changes_no_file_and_the_run_keeps_what_is_new(place: tuple[Path, Path]) -> None:
    folder, elsewhere = place
    before = files_of(tree(folder, elsewhere))
    done = warm(["run", "--device", "virtual", "--budget", "1GiB", "train.py", elsewhere], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    after = files_of(tree(folder, elsewhere))
    assert {path: after[path] for path in before} == before
    new = {os.path.relpath(path, folder) for path in set(after) - set(before)}
    assert new == {"train.fit.npz", "runs/a/log", "../elsewhere/step-2.pt"}
    assert "discarded: " in done.stderr
    assert "kept: " in done.stderr


@needs_layer
@variants("verb", ["run", "record"])
def test_what_is_there_stays_and_what_is_new_is_kept(verb: str, tmp_path: Path, shared_memory: Path) -> None:
    prepared(tmp_path, shared_memory)
    before = files_of(tree(tmp_path, shared_memory))
    options = ["-o", "made.trace.npz"] if verb == "record" else ["--json", "made.json"]
    (tmp_path / options[1]).write_text('{"json_version": 1}')  # of an earlier run
    words = [verb, "--device", "virtual", *options, WRITES]
    done = warm(words, tmp_path, SHARED_FOLDER=str(shared_memory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert failed_cases(done) == [], done.stdout
    after = files_of(tree(tmp_path, shared_memory))
    assert {path: after[path] for path in before} == before
    new = {os.path.relpath(path, tmp_path) for path in set(after) - set(before)}
    kept = {
        "new.pt",
        "fresh.txt",
        "deep/er/est/x",
        "cache_3",
        "thread_7",
        "out/checkpoint-3/state",
        "moved2.txt",
        "link",
    }
    assert kept <= new
    assert not [name for name in new if name.startswith("runs.db")]  # a journal belongs to a file that stays
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out/checkpoint-3/state").read_text() == "zeros"
    assert (tmp_path / options[1]).read_bytes()[:3] != b"of "  # asked for by its name


def as_ordinary_user() -> list[str]:
    """Words before a command that make it one of a user who is not root; skips where that is not possible."""
    if os.geteuid() != 0:
        return []
    words = ["setpriv", "--reuid", str(ORDINARY), "--regid", str(ORDINARY), "--clear-groups"]
    check = [*words, sys.executable, "-c", "import stalloc, numpy, os; assert os.geteuid() != 0"]
    if subprocess.run(check, capture_output=True, check=False).returncode != 0:
        pytest.skip("no other user of this machine can run this Python")
    return words


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that any user can reach, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory(prefix="stalloc-test-") as folder:
        os.chmod(folder, 0o755)
        made = Path(folder) / "home"
        made.mkdir()
        yield made


@pytest.mark.slow
@needs_layer
def test_a_user_who_is_not_root_changes_no_file_either(home: Path, shared_memory: Path) -> None:
    user, folder = as_ordinary_user(), home
    if user:
        os.chown(folder, ORDINARY, ORDINARY)
    prepared(folder, shared_memory, user)
    before = files_of(tree(folder, shared_memory))
    verb = stalloc("run", "--device", "virtual", WRITES)
    done = run([*user, *verb], folder, SHARED_FOLDER=str(shared_memory), HOME=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert failed_cases(done) == [], done.stdout
    after = files_of(tree(folder, shared_memory))
    assert {path: after[path] for path in before} == before
    assert "new.pt" in {os.path.relpath(path, folder) for path in set(after) - set(before)}


@needs_landlock
def test_where_the_machine_allows_no_layer_writes_are_refused_and_no_file_changes(
    tmp_path: Path, shared_memory: Path
) -> None:
    prepared(tmp_path, shared_memory)
    before = tree(tmp_path, shared_memory)
    words = ["run", "--device", "virtual", WRITES]
    done = refused("namespaces", words, tmp_path, SHARED_FOLDER=str(shared_memory))
    assert tree(tmp_path, shared_memory) == before
    assert "temporary" not in failed_cases(done), done.stdout
    assert {"opened", "removed", "renamed"} <= set(failed_cases(done))
    assert "writes are refused (Landlock), since this machine allows no layer" in done.stderr
    assert "--keep-files" in done.stderr


@pytest.mark.slow
@needs_landlock
def test_a_dry_run_whose_writes_are_refused_goes_on_where_it_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import torch\nx = torch.zeros(1 << 20, device='cuda')\n")
    done = refused("namespaces", ["dryrun", "reads.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_nothing_protects_files_the_program_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text("import torch\ntorch.zeros(9, device='cuda')\nopen('made', 'w')\n")
    (tmp_path / "made").write_text("real")
    for verb, code in (("dryrun", 2), ("run", 125)):
        device = ["--device", "virtual"] if verb == "run" else []
        done = refused("all", [verb, *device, "writes.py"], tmp_path)
        assert done.returncode == code
        assert "the program is not run" in done.stderr
        assert "--keep-files" in done.stderr
        assert (tmp_path / "made").read_text() == "real"
    done = refused("all", ["run", "--device", "virtual", "--keep-files", "writes.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").read_text() == ""


def test_files_are_written_for_real_where_that_is_asked_for(place: tuple[Path, Path]) -> None:
    folder, elsewhere = place
    done = warm(["run", "--device", "virtual", "--keep-files", "train.py", elsewhere], folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "last.pt").read_bytes() != b"real"
    assert "--keep-files: what the program writes is written for real" in done.stderr


@needs_layer
def test_info_says_how_files_are_kept_on_this_machine(tmp_path: Path) -> None:
    done = warm(["info", "--json", "-"], tmp_path)
    assert json.loads(done.stdout)["program_files"]["way"] == "overlay"
    assert "has no Landlock" in refused("all", ["info"], tmp_path).stdout


@needs_layer
@variants("to_group", [True, False], ids=["to the group", "to stalloc"])
def test_a_signal_reaches_the_program_once_and_the_report_is_left(tmp_path: Path, to_group: bool) -> None:
    (tmp_path / "waits.py").write_text(
        "import sys, time, torch\nx = torch.zeros(9, device='cuda')\nopen('begun', 'w')\nprint('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [str(word) for word in stalloc("run", "--device", "virtual", "waits.py")]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "reserved peak" in said


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time, torch\nx = torch.zeros(9, device='cuda')\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    words = [str(word) for word in stalloc("run", "--device", "virtual", "waits.py")]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    program = int(process.stdout.readline())
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{program}") and time.monotonic() < until:
        with open(f"/proc/{program}/stat") as file:
            if file.read().split()[2] == "Z":
                break
    assert time.monotonic() < until


@needs_layer
def test_a_program_that_dies_of_a_signal_says_so(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, torch\nopen('new', 'w').write('x')\nos.abort()\n")
    done = warm(["run", "--device", "virtual", "dies.py"], tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert (tmp_path / "new").read_text() == "x"


@needs_layer
def test_files_that_take_too_much_room_end_the_program_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "fills.py").write_text(
        "import time, torch\nx = torch.zeros(9, device='cuda')\n"
        "with open('huge', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))\n"
        "        time.sleep(0.05)\n"
    )
    room = tmp_path / "room"
    room.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", room], check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("only root can make a small file system")
    try:
        # of its own: an interpreter that is warm knows its folder of temporary files already
        done = run(stalloc("run", "--device", "virtual", "fills.py"), tmp_path, TMPDIR=str(room))
    finally:
        subprocess.run(["umount", room], check=True)
    assert done.returncode == 1
    assert "the program's files take more than" in done.stderr
    assert "--keep-files" in done.stderr
    assert not (tmp_path / "huge").exists()
