"""Sources as their writers define them, and that a guess made by a reader shows in every report."""

import itertools
import json

import pytest
from recordings import each, path_of

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.trace import Action, load_traces

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def load(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (trace,) = load_traces(tmp_path / name)
    return trace


@pytest.mark.parametrize(
    ("alloc", "failure", "free"),
    [
        # pointers as {fmt}, printf's %llx and %p write them; streams as pointers and as bare hexadecimal
        ("0x7f0000000000,1000,0x55d0", "0x0,5000,0x55d0", "0x7f0000000000,1000,0x55d0"),
        ("7f0000000000,1000,55d0", "0,5000,55d0", "7f0000000000,1000,55d0"),
        ("0x7f0000000000,1000,0x55d0", "(nil),5000,0x55d0", "0x7f0000000000,1000,0x55d0"),
    ],
)
def test_rmm_writes_pointers_in_three_ways(tmp_path, alloc, failure, free):
    rows = [f"allocate,{alloc}", f"allocate failure,{failure}", f"free,{free}"]
    text = HEADER + "".join(f"77,09:00:0{i}.000250,{row}\n" for i, row in enumerate(rows))
    trace = load(tmp_path, "rmm.csv", text)
    assert trace.action.tolist() == [Action.ALLOC, Action.OOM, Action.FREE_COMPLETED]
    assert trace.address[[0, 2]].tolist() == [0x7F0000000000] * 2
    assert trace.event_size.tolist() == [1000, 5000, 1000]
    assert trace.streams == (0x55D0,)
    assert trace.num_requests == 1
    nine = 9 * 3600 * 1_000_000 + 250
    assert trace.time_us.tolist() == [nine, nine + 1_000_000, nine + 2_000_000]


def test_rmm_as_its_documentation_shows_it(tmp_path):
    trace = load(
        tmp_path,
        "memory_log.csv",
        HEADER
        + "140573312345856,1634567890.123456,allocate,0x7f8a40000000,1024,0x7f8a38001020\n"
        + "140573312345856,1634567890.234567,allocate,0x7f8a40000400,2048,0x7f8a38001020\n"
        + "140573312345856,1634567890.345678,deallocate,0x7f8a40000000,1024,0x7f8a38001020\n",
    )
    assert trace.time_us.tolist() == [1634567890123456, 1634567890234567, 1634567890345678]
    assert list(zip(trace.start.tolist(), trace.end.tolist(), trace.size.tolist(), strict=True)) == [
        (0, 2, 1024),
        (1, 3, 2048),
    ]


@pytest.mark.parametrize("names", ["buffer,start,end,size", "buffer_id,begin,end,size", "id,lower,end,size"])
def test_an_end_is_the_last_moment_as_minimalloc_reads_it(tmp_path, names):
    trace = load(tmp_path, "old.csv", f"{names}\nb1,0,3,10\nb2,4,4,20\n")
    assert list(zip(trace.start.tolist(), trace.end.tolist(), strict=True)) == [(0, 4), (4, 5)]
    assert trace.extra["id"].tolist() == ["b1", "b2"]
    assert trace.info["notes"] == []


def test_alignments_and_gaps_of_minimalloc_are_noted(tmp_path, capsys):
    text = "id,lower,upper,size,alignment,gaps,offset\n0,0,9,64,32,2-4 5-6@1:2,0\n1,1,9,7,1,,64\n"
    trace = load(tmp_path, "new.csv", text)
    assert trace.extra["alignment"].tolist() == [32, 1]
    assert len(trace.info["notes"]) == 2
    assert main(["convert", str(tmp_path / "new.csv"), str(tmp_path / "again.csv")]) == 0
    assert "gaps inside lifespans" in capsys.readouterr().out
    assert (tmp_path / "again.csv").read_text() == (
        "id,lower,upper,size,alignment,offset\n0,0,9,64,32,0\n1,1,9,7,1,64\n"
    )
    plain = load(tmp_path, "plain.csv", "id,lower,upper,size,alignment,gaps\n0,0,9,64,1,\n")
    assert plain.info["notes"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,lower,start,upper,size\n1,0,0,3,5\n", "two columns for lower"),
        ("id,lower,end,size\n1,0,9223372036854775807,5\n", "line 2: upper is"),
        ("id,lower,end,size\n1,4,2,5\n", "line 2: upper is not above lower"),
    ],
)
def test_what_minimalloc_does_not_write_is_refused(tmp_path, text, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, "x.csv", text)


GUESSES = {
    "memory_timeline.json.gz": "each free is taken to end the newest allocation of its size and category",
    "resnet50_v100_kineto_nw0.json.gz": "each free is taken to end the newest allocation of its size",
    "resnet_timeline_hta.json.gz": "each free is taken to end the newest allocation of its size and category",
    "resnet18_zdevito.html.gz": "addresses, streams and the device are not in the page",
    "dtr_resnet32.log.gz": "the log has no addresses and no streams",
}


@pytest.mark.parametrize("name", each(GUESSES))
def test_what_is_guessed_shows_in_every_report(tmp_path, capsys, name):
    file = str(path_of(name))
    for arguments in (
        ["stats", file],
        ["stats", file, "--json", "-"],
        ["convert", file, str(tmp_path / "a.pickle")],
        ["convert", file, str(tmp_path / "b.json"), "--json", "-"],
        ["diff", file, file],
        ["diff", file, file, "--json", "-"],
        ["stats", str(tmp_path / "a.pickle")],  # and in what it was converted to
    ):
        assert main(arguments) == 0
        assert GUESSES[name] in capsys.readouterr().out, arguments


def test_notes_do_not_pile_up_when_a_file_is_converted_again(tmp_path, capsys):
    (tmp_path / "c.csv").write_text("id,lower,upper,size\n0,0,4,1000\n1,1,3,500\n")
    names = ["c.csv", "1.pickle", "2.pickle", "3.pickle"]
    for source, output in itertools.pairwise(names):
        assert main(["convert", str(tmp_path / source), str(tmp_path / output), "--json", "-"]) == 0
        told = json.loads(capsys.readouterr().out)["notes"]
        assert len(told) == len(set(told)) == 2
    first, second = (load_traces(tmp_path / name)[0] for name in ("1.pickle", "3.pickle"))
    assert first.address.tolist() == second.address.tolist()
    assert first.info["notes"] == second.info["notes"]
