"""What training programs do to files: `prepare` makes the tree, without arguments each case checks its own writes."""

import fcntl
import importlib.util
import json
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import numpy as np

SHARED = Path(os.environ["SHARED_FOLDER"])
NAMES = (
    *("log", "other", "moved", "doomed", "cut", "mode", "target", "copied", "by_descriptor"),
    *("best", "last", "cast"),
)
FOLDERS = ("old", "doomed/in", "tree", "removed/in", "out/checkpoint-1", "out/checkpoint-2")
FILES = ("old/file", "doomed/in/x", "tree/leaf", "removed/in/x", "out/checkpoint-1/state", "out/checkpoint-2/state")


def has(name):
    return importlib.util.find_spec(name) is not None


def prepare():
    for one in FOLDERS:
        Path(one).mkdir(parents=True)
    SHARED.mkdir()
    (SHARED / "there.txt").write_text("real")
    (SHARED / "gone.txt").write_text("real")
    for name in NAMES:
        Path(f"{name}.txt").write_text(name)
    os.symlink("target.txt", "linked.txt")
    for path in [
        "old/file",
        "doomed/in/x",
        "tree/leaf",
        "removed/in/x",
        "out/checkpoint-1/state",
        "out/checkpoint-2/state",
        "model.pt",
    ]:
        Path(path).write_text("real")
    np.save("a.npy", np.ones(100))
    for name in ("map.bin", "map2.bin"):
        np.ones(10_000, np.uint8).tofile(name)
    if has("safetensors"):
        from safetensors.numpy import save_file

        save_file({"w": np.ones(1000, np.float32)}, "model.safetensors")
    if has("h5py"):
        import h5py

        with h5py.File("data.h5", "w") as file:
            file["x"] = np.ones(100)
    base = sqlite3.connect("runs.db")
    base.execute("create table runs (n)")
    base.execute("insert into runs values (1)")
    base.commit()
    base.close()


def text(path, words):
    Path(path).write_text(words)
    assert Path(path).read_text() == words


def saved_by_torch():
    import torch

    for path in ("model.pt", "new.pt"):
        torch.save({"w": torch.zeros(1000, device="cuda")}, path)
        assert not torch.load(path, map_location="cpu")["w"].any()
    torch.save({"w": torch.zeros(9)}, "old_format.pt", _use_new_zipfile_serialization=False)
    assert not torch.load("old_format.pt")["w"].any()


def saved_by_safetensors():
    if has("safetensors"):
        from safetensors.numpy import load_file, save_file

        assert load_file("model.safetensors")["w"].all()
        save_file({"w": np.zeros(1000, np.float32)}, "model.safetensors")
        assert not load_file("model.safetensors")["w"].any()


def saved_by_numpy():
    np.save("a.npy", np.zeros(100))
    assert not np.load("a.npy", mmap_mode="r").any()


def mapped():
    array = np.memmap("map.bin", np.uint8, "r+")
    assert array.all()
    array[:] = 0
    array.flush()
    assert not np.fromfile("map.bin", np.uint8).any()
    with open("map2.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[:4] = b"\0\0\0\0"
    assert Path("map2.bin").read_bytes()[:4] == b"\0\0\0\0"


def hdf5():
    if has("h5py"):
        import h5py

        with h5py.File("data.h5", "a") as file:
            file["x"][:] = 0
            file.create_dataset("y", data=np.zeros(10))
        with h5py.File("data.h5", "r") as file:
            assert not file["x"][:].any()
            assert "y" in file


def database():
    base = sqlite3.connect("runs.db")
    base.execute("pragma journal_mode=wal")
    base.execute("insert into runs values (2)")
    base.commit()
    assert len(base.execute("select * from runs").fetchall()) == 2
    assert len(sqlite3.connect("runs.db").execute("select * from runs").fetchall()) == 2


def opened():
    text("log.txt", "zeros")
    with open("log.txt", "a") as file:
        file.write("+")
    assert Path("log.txt").read_text() == "zeros+"
    with open("other.txt", "r+") as file:
        file.write("Z")
    assert Path("other.txt").read_text() == "Zther"
    with open("fresh.txt", "x") as file:
        file.write("x")
    try:
        os.close(os.open("fresh.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise AssertionError


def renamed():
    text("part", "zeros")
    os.replace("part", "best.txt")
    assert Path("best.txt").read_text() == "zeros"
    assert not os.path.exists("part")
    os.rename("moved.txt", "moved2.txt")
    assert "moved.txt" not in os.listdir()
    assert Path("moved2.txt").read_text() == "moved"


def renamed_folder():
    os.rename("old", "new")
    assert Path("new/file").read_text() == "real"
    assert not os.path.exists("old")


def removed():
    os.unlink("doomed.txt")
    assert "doomed.txt" not in os.listdir()
    shutil.rmtree("doomed")
    os.mkdir("doomed")
    assert os.listdir("doomed") == []
    os.makedirs("deep/er/est")
    text("deep/er/est/x", "x")


def attributes():
    os.truncate("cut.txt", 2)
    assert os.path.getsize("cut.txt") == 2
    os.symlink("cut.txt", "link")
    os.link("cut.txt", "hard")
    assert Path("hard").read_text() == "cu"
    os.chmod("mode.txt", 0o600)
    assert os.stat("mode.txt").st_mode & 0o777 == 0o600
    os.utime("mode.txt", (1, 1))
    assert os.path.getmtime("mode.txt") == 1
    text("linked.txt", "through the link")
    assert Path("target.txt").read_text() == "through the link"


def copied():
    shutil.copy2("copied.txt", "copy.txt")
    shutil.copy("copied.txt", "cast.txt")
    assert Path("cast.txt").read_text() == "copied"
    shutil.copytree("tree", "tree2")
    shutil.move("tree2", "tree3")
    assert Path("tree3/leaf").read_text() == "real"


def by_other_programs():
    subprocess.run(["rm", "-r", "removed"], check=True)
    assert not os.path.exists("removed")
    subprocess.run(
        "echo zeros > shell.txt; sed -i s/zeros/none/ shell.txt; mv last.txt first.txt", shell=True, check=True
    )
    assert Path("shell.txt").read_text() == "none\n"
    if shutil.which("git"):
        subprocess.run("git init -q . && git add shell.txt", shell=True, check=True)


class Data:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        text(f"cache_{index}", str(index))
        return np.ones(1000, np.float32)


def in_workers():
    import torch

    seen = sum(batch.sum() for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=2))
    assert seen == 4000, seen
    assert Path("cache_3").read_text() == "3"


def in_threads():
    threads = [threading.Thread(target=text, args=(f"thread_{number}", "x")) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(os.path.exists(f"thread_{number}") for number in range(8))


def rotated():
    os.makedirs("out/checkpoint-3")
    text("out/checkpoint-3/state", "zeros")
    for path in sorted(Path("out").glob("checkpoint-*"))[:-1]:
        shutil.rmtree(path)
    (latest,) = Path("out").glob("checkpoint-*")
    assert (latest / "state").read_text() == "zeros"


def in_shared_memory():
    text(SHARED / "there.txt", "zeros")
    (SHARED / "gone.txt").unlink()
    assert sorted(os.listdir(SHARED)) == ["there.txt"]


def temporary():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"1")
    with tempfile.TemporaryDirectory() as folder:
        text(f"{folder}/x", "x")


def by_descriptor():
    here = os.open(".", os.O_RDONLY)
    handle = os.open("made_by_descriptor", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here)
    os.write(handle, b"x")
    os.close(handle)
    os.unlink("by_descriptor.txt", dir_fd=here)
    assert not os.path.exists("by_descriptor.txt")


def locked():
    with open("lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)


CASES = (
    *(saved_by_torch, saved_by_safetensors, saved_by_numpy, mapped, hdf5, database, opened, renamed, renamed_folder),
    *(removed, attributes, copied, by_other_programs, in_workers, in_threads, rotated, in_shared_memory, temporary),
    *(by_descriptor, locked),
)

if __name__ == "__main__":
    if sys.argv[1:] == ["prepare"]:
        prepare()
        sys.exit()
    failed = {}
    for case in CASES:
        try:
            case()
        except BaseException:
            failed[case.__name__] = traceback.format_exc()
    print("FAILED", json.dumps(sorted(failed)))
    for name, said in failed.items():
        print(name, said)
