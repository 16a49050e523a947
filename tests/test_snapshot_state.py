"""Snapshots without history: what there was at that moment is told, and what needs history says so."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import pytest

from stalloc.cli import main

MIB = 1 << 20
FRAMES = [{"filename": "net.py", "line": 7, "name": "forward"}]


def segment(address, *blocks, kind="large", **more):
    """A segment of torch's allocator from (MiB, is live) of its blocks."""
    made, at = [], address
    for size, is_live in blocks:
        state = {"state": "active_allocated", "frames": FRAMES} if is_live else {"state": "inactive"}
        made.append({"address": at, "size": size * MIB, "requested_size": size * MIB * is_live, **state})
        at += size * MIB
    total = at - address
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": 0,
        "segment_type": kind,
        "blocks": made,
    } | more


SEGMENTS = [
    segment(1 << 30, (300, False)),
    segment(2 << 30, (60, True), (40, False), (20, True)),
    segment(3 << 30, (8, True)),
]
SNAPSHOTS = [
    {"segments": SEGMENTS, "device_traces": [[]]},
    {"segments": SEGMENTS, "device_traces": []},
    {"segments": SEGMENTS},
    SEGMENTS,
]


@pytest.fixture(params=range(len(SNAPSHOTS)))
def file(request, tmp_path):
    path = tmp_path / "state.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOTS[request.param]))
    return str(path)


def told(capsys, *words):
    assert main([*words, "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert main(list(words)) == 0
    return device, capsys.readouterr().out


def test_the_state_is_explained(file, capsys):
    device, shown = told(capsys, "explain", file)
    assert (device["reserved_bytes"], device["allocated_bytes"]) == (428 * MIB, 88 * MIB)
    assert {name: size for name, size in device["causes"].items() if size} == {
        "cache_never_returned": 300 * MIB,
        "hard_fragmentation": 40 * MIB,
    }
    assert "torch.cuda.empty_cache() returns them" in shown
    assert "when the snapshot was taken" in shown
    assert "Next: stalloc top" in shown


def test_who_holds_memory_is_told(file, capsys):
    device, shown = told(capsys, "top", file)
    assert [(one["name"], one["held_bytes"]) for one in device["by_site"]] == [("net.py:7 forward", 88 * MIB)]
    assert device["growth"] == []
    assert "when the snapshot was taken" in shown
    device, _ = told(capsys, "top", "--tree", file)
    assert device["tree"]["held_bytes"] == 88 * MIB
    device, shown = told(capsys, "stats", file)
    assert (device["reserved_peak_bytes"], device["allocated_peak_bytes"]) == (428 * MIB, 88 * MIB)
    assert "period" not in shown
    assert "Next: stalloc explain" in shown


def test_a_page_is_written(file, tmp_path, capsys):
    assert main(["report", file, "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize("verb", ["plan", "simulate", "timeline", "convert"])
def test_what_needs_history_says_so(file, capsys, verb):
    words = [verb, file, *(["x.trace.npz"] if verb == "convert" else [])]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "history was switched off" in said


def zipped(*members):
    """A zip archive as trackers take it, of (name, bytes)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(data):
    """A tar archive of one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("state")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


WHOLE = {"segments": SEGMENTS, "device_traces": [[]]}
PICKLE = pickle.dumps(WHOLE)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("state.json", json.dumps(WHOLE).encode()),
        ("list.json", json.dumps(SEGMENTS, indent=1).encode()),
        ("state.pickle", pickle.dumps(WHOLE, 0)),
        ("state.pickle.bz2", bz2.compress(PICKLE)),
        ("state.pickle.xz", lzma.compress(PICKLE)),
        ("state.zip", zipped(("state.pickle", PICKLE), ("__MACOSX/._state.pickle", b"x"))),
        ("twice.zip", zipped(("state.pickle.gz", gzip.compress(PICKLE)))),
        ("state.pt", zipped(("state/data.pkl", pickle.dumps(WHOLE, 2)), ("state/version", b"3"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_snapshot_is_read_from_what_it_was_packed_in(tmp_path, capsys, name, data):
    (tmp_path / name).write_bytes(data)
    device, _ = told(capsys, "explain", str(tmp_path / name))
    assert (device["reserved_bytes"], device["allocated_bytes"]) == (428 * MIB, 88 * MIB)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zipped(("rank0.pickle", PICKLE), ("rank1.pickle", PICKLE)), "an archive of 2 files"),
        (zipped(("state.pickle", PICKLE))[:-40], "the zip data is damaged or cut short"),
        (bz2.compress(PICKLE)[:-9], "the bzip2 data is damaged or cut short"),
        (tarred(PICKLE), "a tar archive"),
        (gzip.compress(tarred(b"CUDA out of memory")), "a tar archive"),
        (
            gzip.compress(b"\x0a\x04\x08\x01\x10\x02\x12\x08" * 90 + b"2\x0ballocations2\x05count2\x05space2\x05bytes"),
            "a profile of pprof",
        ),
        (b"SQLite format 3\0" + bytes(range(200)) * 9, "not a trace: expected"),
        (json.dumps(WHOLE).encode()[:-9], "damaged or cut short"),
    ],
    ids=["archive of two", "cut zip", "cut bzip2", "tar", "packed tar", "pprof", "SQLite", "cut JSON"],
)
def test_what_cannot_be_unpacked_is_named(tmp_path, capsys, data, said):
    (tmp_path / "state").write_bytes(data)
    for verb in ("explain", "stats"):
        assert main([verb, str(tmp_path / "state")]) == 2
        assert said in capsys.readouterr().err


def test_a_log_in_a_zip_archive_is_a_log(tmp_path, capsys):
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 8.00 GiB total capacity; 7.50 GiB already allocated; "
    )
    text += "0.25 GiB free; 7.60 GiB reserved in total by PyTorch)"
    (tmp_path / "log.zip").write_bytes(zipped(("train.log", text.encode())))
    assert main(["explain", str(tmp_path / "log.zip")]) == 0
    assert "The cause is capacity" in capsys.readouterr().out
