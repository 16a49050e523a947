"""The folder of kept plans: private, or not used, and never in the program's way."""

import os
from pathlib import Path

import pytest
from warm_programs import run_stalloc

from stalloc.integrations.plan_cache import PlanCache
from stalloc.planner import load_plans, plan, save_plans
from stalloc.trace import load_traces

pytestmark = pytest.mark.usefixtures("usual_umask")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
SOMEBODY = 12345
ADVICE = "name another folder in STALLOC_CACHE, or set it to off."


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A kept plan in a folder of its own."""
    csv = tmp_path / "requests.csv"
    csv.write_text("id,lower,upper,size\n0,0,2,512\n1,1,3,1024\n")
    file = tmp_path / "cache" / "program.plan.npz"
    file.parent.mkdir(mode=0o700)
    save_plans(file, [plan(load_traces(csv)[0])])
    return file


def _said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_plan_in_a_private_folder_is_found(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = PlanCache(kept)
    [found] = cache.load()
    assert (found.num_requests, cache.loaded, cache.kept) == (2, True, True)
    assert PlanCache(kept.with_name("other.plan.npz")).load() == []
    assert PlanCache(kept.parent / "missing" / "x.plan.npz").load() == []
    assert os.listdir(kept.parent) == [kept.name], "looking makes nothing"
    assert _said(capsys) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_to_is_left_alone(
    kept: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    kept.parent.chmod(mode)
    cache = PlanCache(kept)
    assert cache.load() == []
    assert (cache.loaded, cache.kept) == (False, False)
    [sentence] = _said(capsys)
    who = "everybody" if mode & 0o002 else "its group"
    assert sentence == (
        f"stalloc: the plan could not be kept for the next run: {kept.parent} is not used, because {who} can write to "
        f"{kept.parent}: run chmod go-w {kept.parent}, or {ADVICE}"
    )
    assert kept.exists(), "nothing of theirs is removed"


@needs_root
def test_a_folder_or_a_plan_of_somebody_else_is_not_used(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chown(kept, SOMEBODY, SOMEBODY)
    assert PlanCache(kept).load() == []
    assert f"the plan of the last run is ignored: {kept} is not used, because" in _said(capsys)[0]
    assert not kept.exists()
    os.chown(kept.parent, SOMEBODY, SOMEBODY)
    assert PlanCache(kept).load() == []
    [sentence] = _said(capsys)
    assert sentence.endswith(f"{kept.parent} belongs to the user with the number {SOMEBODY}: {ADVICE}")


def _by_others(file: Path) -> None:
    file.chmod(0o666)


def _elsewhere(file: Path) -> None:
    file.rename(file.with_suffix(".aside"))
    file.symlink_to(file.with_suffix(".aside"))


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])


@pytest.mark.parametrize("spoil", [_by_others, _elsewhere, _pipe, _damaged])
def test_what_is_no_plan_of_ours_is_ignored_in_one_sentence_and_removed(
    kept: Path, capsys: pytest.CaptureFixture[str], spoil
) -> None:
    spoil(kept)
    assert PlanCache(kept).load() == []
    [sentence] = _said(capsys)
    assert sentence.startswith("stalloc: the plan of the last run is ignored: ")
    assert not os.path.lexists(kept)
    assert PlanCache(kept).load() == []
    assert _said(capsys) == []


@pytest.mark.parametrize("place", ["/dev/null", "/proc/self/mem", "x" * 300, "a/" * 3000, "loop"])
def test_a_place_that_cannot_be_a_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    cache = PlanCache(Path(place) / "program.plan.npz")
    found = cache.load()
    assert (found, cache.kept) == ([], False)
    said = _said(capsys)
    assert len(said) <= 1
    assert all(line.startswith("stalloc: the plan could not be kept") and line.endswith(ADVICE) for line in said)


@pytest.mark.usefixtures("cupy_installed")
def test_a_program_goes_on_without_kept_plans(tmp_path: Path) -> None:
    """Under `stalloc run`; what is learnt at the end is not written there either."""
    folder, loop = tmp_path / "cache", Path(__file__).parent / "programs" / "cupy_loop.py"
    folder.mkdir()
    folder.chmod(0o777)
    words = "run", "--device", "virtual", loop, "60"
    variables = {**os.environ, "STALLOC_CACHE": str(folder)}
    done = run_stalloc(*words, variables=variables)
    assert done.returncode == 0, done.stderr
    assert "the program prints" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "the plan could not be kept for the next run" in done.stderr
    assert os.listdir(folder) == []
    folder.chmod(0o755)
    done = run_stalloc(*words, variables=variables)
    assert done.stderr == ""
    [written] = folder.iterdir()
    assert written.stat().st_mode & 0o777 == 0o600
    assert load_plans(written)[0].kind == "program"
