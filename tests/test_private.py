"""Folders whose content is trusted: made for this user alone, refused where anybody else could change something."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stalloc.errors import SetupError
from stalloc.files import SCRATCH_PATTERN
from stalloc.private import check_private_file, private_folder, read_private, remove_old

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
SOMEBODY = 12345
ADVICE = "name another folder"
pytestmark = pytest.mark.usefixtures("usual_umask")
DAY = 24 * 3600


def test_what_is_made_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b" / "c", ADVICE)
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b" / "c"
    for folder in (made, made.parent, made.parent.parent):
        assert folder.stat().st_mode & 0o7777 == 0o700
    assert private_folder(made, ADVICE) == made


def test_what_is_not_there_is_only_made_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "a" / "b", ADVICE, make=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o707, 0o720, 0o1777])
@pytest.mark.parametrize("weak", ["plans", "cache"])
def test_a_folder_or_a_folder_above_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, weak: str) -> None:
    folder = tmp_path / "cache" / "plans"
    folder.mkdir(parents=True)
    (tmp_path / "cache" / "plans" if weak == "plans" else tmp_path / "cache").chmod(mode)
    if weak == "cache" and mode == 0o1777:
        assert private_folder(folder, ADVICE) == folder  # nobody can replace it there
        return
    who, place = "everybody" if mode & 0o002 else "its group", folder if weak == "plans" else folder.parent
    with pytest.raises(SetupError) as refused:
        private_folder(folder, ADVICE)
    assert str(refused.value) == (
        f"{folder} is not used, because {who} can write to {place}: run chmod go-w {place}, or {ADVICE}."
    )
    if mode != 0o1777:
        with pytest.raises(SetupError):
            private_folder(folder / "deeper", ADVICE)
    assert os.listdir(folder) == [], "nothing is made in what is refused"


@needs_root
@pytest.mark.parametrize("foreign", ["plans", "cache"])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, foreign: str) -> None:
    folder = tmp_path / "cache" / "plans"
    folder.mkdir(parents=True, mode=0o755)
    place = folder if foreign == "plans" else folder.parent
    os.chown(place, SOMEBODY, SOMEBODY)
    with pytest.raises(SetupError) as refused:
        private_folder(folder, ADVICE)
    assert str(refused.value) == (
        f"{folder} is not used, because {place} belongs to the user with the number {SOMEBODY}: {ADVICE}."
    )


def test_links_are_followed_where_nobody_can_change_them(tmp_path: Path) -> None:
    real = tmp_path / "real" / "deep"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to("../link/deep")
    assert private_folder(tmp_path / "link" / "up" / "new", ADVICE) == real / "new"
    assert private_folder(tmp_path / "link" / ".." / "real" / "deep", ADVICE) == real
    (tmp_path / "absolute").symlink_to(real)
    assert private_folder(tmp_path / "absolute", ADVICE) == real
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        private_folder(tmp_path / "loop", ADVICE)


def _weak_folder_of_link(base: Path) -> Path:
    """The link leads to a good folder, but everybody can replace the link."""
    (base / "good").mkdir()
    (base / "weak").mkdir()
    (base / "weak" / "link").symlink_to(base / "good")
    (base / "weak").chmod(0o777)
    return base / "weak" / "link"


def _weak_folder_behind_link(base: Path) -> Path:
    (base / "weak").mkdir()
    (base / "weak").chmod(0o777)
    (base / "link").symlink_to(base / "weak")
    return base / "link"


def _weak_folder_on_the_way_back(base: Path) -> Path:
    (base / "weak" / "in").mkdir(parents=True)
    (base / "good").mkdir()
    (base / "weak").chmod(0o777)
    (base / "good" / "link").symlink_to("../weak/in/../../good")
    return base / "good" / "link"


@pytest.mark.parametrize("build", [_weak_folder_of_link, _weak_folder_behind_link, _weak_folder_on_the_way_back])
def test_a_way_that_others_can_turn_elsewhere_is_refused(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    with pytest.raises(SetupError, match=f"everybody can write to {tmp_path}/weak"):
        private_folder(build(tmp_path), ADVICE)


@needs_root
def test_a_link_of_somebody_else_among_everybodys_files_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "good").mkdir()
    (shared / "stalloc").symlink_to(tmp_path / "good")
    assert private_folder(shared / "stalloc", ADVICE) == tmp_path / "good"
    os.lchown(shared / "stalloc", SOMEBODY, SOMEBODY)
    with pytest.raises(SetupError, match="belongs to the user with the number"):
        private_folder(shared / "stalloc", ADVICE)
    os.unlink(shared / "stalloc")
    (shared / "stalloc").mkdir()
    os.chown(shared / "stalloc", SOMEBODY, SOMEBODY)
    with pytest.raises(SetupError, match="belongs to the user with the number"):
        private_folder(shared / "stalloc" / "plans", ADVICE)


def test_a_file_in_the_way_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "plans"):
        with pytest.raises(NotADirectoryError):
            private_folder(path, ADVICE)


def test_only_files_that_nobody_else_could_have_written_are_read(tmp_path: Path) -> None:
    good, weak, link, pipe = (tmp_path / name for name in ("good", "weak", "link", "pipe"))
    good.write_text("mine")
    good.chmod(0o644)
    weak.write_text("anybody's")
    weak.chmod(0o664)
    link.symlink_to(good)
    os.mkfifo(pipe)
    check_private_file(good)
    assert read_private(good) == b"mine"
    for path, reason in (
        (weak, f"its group can write to {weak}"),
        (link, "it is no regular file"),
        (pipe, "it is no regular file"),
    ):
        for act in (check_private_file, read_private):
            with pytest.raises(SetupError) as refused:
                act(path)
            assert str(refused.value) == f"{path} is not used, because {reason}: remove it."
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "none")


@needs_root
def test_a_file_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("theirs")
    os.chown(file, SOMEBODY, SOMEBODY)
    with pytest.raises(SetupError, match="belongs to the user with the number"):
        read_private(file)


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, young, other = (tmp_path / SCRATCH_PATTERN.replace("*", name) for name in ("1", "2", "3"))
    named = tmp_path / "named.part"
    for path in (old, young, named):
        path.write_text("")
    (other / "deep").mkdir(parents=True)
    for path in (old, other, named):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    private_folder(tmp_path, ADVICE)
    assert sorted(tmp_path.iterdir()) == sorted([young, named])
    remove_old(tmp_path, "*.part")
    assert list(tmp_path.iterdir()) == [young]


@needs_root
def test_what_others_left_is_not_ours_to_remove(tmp_path: Path) -> None:
    theirs = tmp_path / SCRATCH_PATTERN.replace("*", "1")
    theirs.write_text("")
    os.chown(theirs, SOMEBODY, SOMEBODY)
    os.utime(theirs, (time.time() - 2 * DAY,) * 2)
    private_folder(tmp_path, ADVICE)
    assert theirs.exists()
