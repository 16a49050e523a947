"""`stalloc plan` and `stalloc validate` as a user calls them."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from recordings import path_of

from stalloc.cli import main
from stalloc.planner import load_plans, save_plans

INSTANCE = "id,lower,upper,size\n0,0,40,1000\n1,10,20,512\n2,15,60,4096\n3,30,60,700\n4,45,50,3000\n"


@pytest.fixture
def instance(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(INSTANCE)
    return path


@pytest.fixture
def plan_file(tmp_path, instance, capsys):
    path = tmp_path / "small.plan.npz"
    assert main(["plan", str(instance), "-o", str(path)]) == 0
    capsys.readouterr()
    return path


def test_it_tells_requests_bound_and_peak(instance, capsys):
    assert main(["plan", str(instance), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [str(instance)]
    (device,) = result["devices"]
    assert device["requests"] == device["planned_requests"] == 5
    assert device["lower_bound_bytes"] == device["peak_bytes"] == 4096 + 1024 + 3072
    assert (device["optimal"], device["gap_bytes"], device["kind"]) == (True, 0, "trace")
    assert "output" not in device


def test_the_table_names_the_file_as_it_is(tmp_path, capsys):
    path = tmp_path / "[bold]odd[red] name.csv"
    path.write_text(INSTANCE)
    assert main(["plan", str(path)]) == 0
    assert "[bold]odd[red] name.csv" in capsys.readouterr().out


def test_several_files_are_planned_in_order(tmp_path, instance, capsys):
    other = tmp_path / "other.csv"
    other.write_text("id,lower,upper,size\n0,0,1,512\n")
    assert main(["plan", str(other), str(instance), "--json", "-"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [device["file"] for device in devices] == [str(other), str(instance)]


def test_the_alignment_is_kept(tmp_path, instance):
    path = tmp_path / "coarse.plan.npz"
    assert main(["plan", str(instance), "--align", "4096", "-o", str(path)]) == 0
    (plan,) = load_plans(path)
    assert not (plan.offset % 4096).any()
    assert plan.peak_bytes % 4096 == 0


def test_the_same_trace_gives_the_same_bytes(tmp_path, instance):
    for name in ("a.plan.npz", "b.plan.npz"):
        assert main(["plan", str(instance), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.plan.npz").read_bytes() == (tmp_path / "b.plan.npz").read_bytes()


def test_the_run_prints_a_next_command_that_works(instance, plan_file, capsys):
    assert main(["plan", str(instance), "-o", str(plan_file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: stalloc ")]
    assert main(line.removeprefix("Next: stalloc ").split()) == 0


def test_a_valid_plan_passes(instance, plan_file, capsys):
    assert main(["validate", str(plan_file), str(instance), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert result["devices"][0]["requests"] == 5


def test_a_request_moved_by_512_bytes_into_another_fails_as_overlap(instance, plan_file, capsys):
    (plan,) = load_plans(plan_file)
    live_together = [(0, 1), (0, 2), (1, 2), (2, 3), (2, 4), (3, 4)]
    top = plan.offset + (plan.size + 511) // 512 * 512
    below, above = next((a, b) for pair in live_together for a, b in (pair, pair[::-1]) if top[a] == plan.offset[b])
    offset = plan.offset.copy()
    offset[above] -= 512
    save_plans(plan_file, [dataclasses.replace(plan, offset=offset)])
    assert main(["validate", str(plan_file), str(instance), "--json", "-"]) == 1
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["ok"], device["reason"]) == (False, "overlap")
    assert f"requests {min(below, above)} and {max(below, above)}" in device["detail"]


def test_the_reason_is_told_to_people_too(instance, plan_file, capsys):
    (plan,) = load_plans(plan_file)
    save_plans(plan_file, [dataclasses.replace(plan, offset=np.zeros(5, np.int64))])
    assert main(["validate", str(plan_file), str(instance)]) == 1
    assert "invalid, overlap: requests" in capsys.readouterr().out


def test_a_plan_of_another_trace_fails_as_mismatch(tmp_path, plan_file, capsys):
    other = tmp_path / "other.csv"
    other.write_text(INSTANCE.replace("4096", "4097"))
    assert main(["validate", str(plan_file), str(other), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["devices"][0]["reason"] == "trace-mismatch"


def test_a_device_that_the_plan_lacks_is_a_mismatch(instance, plan_file, capsys):
    (plan,) = load_plans(plan_file)
    save_plans(plan_file, [dataclasses.replace(plan, device=1)])
    assert main(["validate", str(plan_file), str(instance), "--json", "-"]) == 1
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [(device["device"], device["reason"]) for device in devices] == [
        (1, "trace-mismatch"),
        (0, "trace-mismatch"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{trace}", "-o", "{folder}/none/a.plan.npz"],
        ["plan", "{trace}", "-o", "{folder}"],
        ["plan", "{trace}", "-o", "{trace}"],
        ["plan", "{trace}", "{trace}", "-o", "{folder}/a.plan.npz"],
        ["plan", "{trace}", "--align", "500"],
        ["plan", "{trace}", "--align", "0"],
        ["plan", "{trace}", "--method", "best"],
        ["plan", "{trace}", "--time-budget", "-1"],
        ["plan", "{trace}", "--fixed", "{folder}/missing.csv"],
        ["plan", "{trace}", "--fixed", "{trace}"],
        ["plan", "{trace}", "{trace}", "--fixed", "{trace}"],
        ["plan", "{trace}", "--csv", "{folder}"],
        ["plan", "{trace}", "--csv", "{trace}"],
        ["plan", "{folder}/missing.csv"],
        ["plan", "{trace}", "--json", "{folder}/none/a.json"],
        ["validate", "{trace}", "{trace}"],
        ["validate", "{folder}/missing.plan.npz", "{trace}"],
        ["validate", "{folder}", "{trace}"],
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, instance, said, arguments):
    filled = [argument.format(trace=instance, folder=tmp_path) for argument in arguments]
    assert main(filled) == 2
    error = said()
    assert error.startswith("stalloc: ")
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.csv"]


def test_the_trace_survives_a_plan_written_over_it(instance):
    assert main(["plan", str(instance), "-o", str(instance)]) == 2
    assert instance.read_text() == INSTANCE


def test_fixed_requests_stay_and_csv_tells_where_all_are(tmp_path, instance, capsys):
    fixed, out = tmp_path / "fixed.csv", tmp_path / "out.csv"
    fixed.write_text("offset,id\n8192,3\n512,1\n")
    assert main(["plan", str(instance), "--fixed", str(fixed), "--csv", str(out), "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["csv"] == str(out)
    header, *lines = out.read_text().splitlines()
    assert header == "id,lower,upper,size,offset"
    rows = {line.split(",")[0]: [int(cell) for cell in line.split(",")[1:]] for line in lines}
    assert [f"{name},{','.join(map(str, row[:3]))}" for name, row in sorted(rows.items())] == INSTANCE.splitlines()[1:]
    assert (rows["3"][3], rows["1"][3]) == (8192, 512)
    assert main(["plan", str(out)]) == 0  # what is written can be read


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("0,0\n2,512\n", "id 0) and row 2 (id 2)"),
        ("0,100\n", "id 0"),
        ("9,0\n", "'9'"),
        ("0,0\n0,0\n", "line 3"),
        ("0,-1\n", "line 2"),
        ("0\n", "line 2"),
    ],
)
def test_wrong_places_are_one_sentence(tmp_path, instance, capsys, lines, named):
    fixed = tmp_path / "fixed.csv"
    fixed.write_text("id,offset\n" + lines)
    assert main(["plan", str(instance), "--fixed", str(fixed)]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", ["7,0,40,-1", "7,9,4,100", f"7,0,40,{2**63}", "3,0,40,100", "7,0,40,1.5"])
def test_wrong_requests_are_one_sentence_that_names_them(tmp_path, capsys, line):
    path = tmp_path / "wrong.csv"
    path.write_text(f"{INSTANCE}{line}\n")
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stalloc: ")
    assert error.count("\n") == 1
    assert "line 7" in error or "id 3 " in error


def test_sizes_of_nothing_take_no_room(tmp_path, capsys):
    path = tmp_path / "nothing.csv"
    path.write_text(f"{INSTANCE}7,0,40,0\n")
    assert main(["plan", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["peak_bytes"] == 4096 + 1024 + 3072


def test_ctrl_c_ends_with_the_best_plan_so_far(tmp_path):
    pieces = [(0, 1000, 0, 100_000)]
    rng = np.random.default_rng(5)
    while len(pieces) < 150:
        index = max(range(len(pieces)), key=lambda i: (pieces[i][1] - pieces[i][0]) * (pieces[i][3] - pieces[i][2]))
        first, last, low, high = pieces.pop(index)
        if rng.random() < 0.5:
            cut = int(rng.integers(first + 1, last))
            pieces += [(first, cut, low, high), (cut, last, low, high)]
        else:
            cut = int(rng.integers(low + 1, high))
            pieces += [(first, last, low, cut), (first, last, cut, high)]
    path = tmp_path / "tight.csv"
    path.write_text(
        "id,lower,upper,size\n" + "".join(f"{i},{a},{b},{d - c}\n" for i, (a, b, c, d) in enumerate(pieces))
    )
    source = (
        "import signal, sys, threading\n"
        "from stalloc.cli import main\n"
        "import stalloc.planner.planning as planning\n"
        "made = planning.plan_arrays\n"
        "def interrupted(*args, **options):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return made(*args, **options)\n"
        "planning.plan_arrays = interrupted\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", source, "plan", str(path), "--align", "1", "--time-budget", "500", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "best plan so far" in done.stderr
    (device,) = json.loads(done.stdout)["devices"]
    assert (device["interrupted"], device["optimal"]) == ("Ctrl-C", False)
    assert device["planned_requests"] == 150


def test_what_a_loader_had_to_guess_is_said(capsys):
    assert main(["plan", str(path_of("memory_timeline.json.gz"))]) == 0
    assert "no addresses in the file: each free is taken to end the newest allocation" in capsys.readouterr().out
