"""What strangers wrote reaches the terminal as printable text: no control characters, no markup, no forged lines."""

import json
import os
import pickle
import random
import unicodedata
import zipfile

import numpy as np
import pytest
from properties import variants

from stalloc import printable
from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.notices import say
from stalloc.planner import plan, save_plans
from stalloc.trace import load_traces, save_traces

SEED = 12
ADDRESS = 0x7F00_0000_0000
PIECES = (
    *("\x1b[2J", "\x1b]8;;http://x\x07", "\x9b31m", "\r", "\n", "\nFORGED", "\x00", "\x7f", "\x08\x08", "\t"),
    *("\u202e", "\u2066", "\u2069", "\u200e", "\u061c", "\u2028", "\u2029", "\u200b", "\ufeff", "\u00ad", "\U000e0041"),
    *("\ud800", "\udcff", "\x85"),
    *("[bold]", "[/]", "[/bold]", "[link=http://x]", "[@click=f]", "[red", "]", "\\", "\\[", ":warning:"),
    *("layer", "Ünïcode", "数据", " ", "x" * 500),
)
FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def text_of(rng):
    """A few words, of which some try to steer the terminal."""
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))


def json_text_of(rng):
    """The same, for files in UTF-8, which hold no halves of pairs."""
    return text_of(rng).encode("utf-8", "ignore").decode()


def argument_text_of(rng):
    """The same, for arguments, variables and names of files: bytes that are no UTF-8 come as halves of pairs."""
    return os.fsdecode(text_of(rng).replace("\x00", "").encode("utf-8", "ignore") + rng.choice([b"", b"\xff"]))


def check(capsys, arguments, *, exit_code=None, one_sentence=True):
    """Run a verb; what it prints has to be harmless, and an error one sentence."""
    try:
        code = main(arguments)
    except SystemExit as ending:  # a usage error, of several lines
        code, one_sentence = ending.code, False
    out, err = capsys.readouterr()
    found = {f"{char!r}" for char in out + err if char != "\n" and unicodedata.category(char) in FORBIDDEN}
    assert not found, f"{arguments} printed {found}"
    assert not [line for line in (out + err).split("\n") if line.startswith("FORGED")]
    assert exit_code is None or code == exit_code, err
    if code in (2, 125):
        assert not out
        if one_sentence:
            assert err.startswith("stalloc: ")
            assert err.count("\n") == 1
    return code, out, err


def event(rng, action, place, size):
    frames = [{"filename": f"{json_text_of(rng)}.py", "line": 1, "name": json_text_of(rng)} for _ in range(2)]
    return {"action": action, "addr": ADDRESS + place, "size": size, "stream": 0, "time_us": 0, "frames": frames}


def snapshot(rng):
    """A snapshot that ends out of memory and whose every text is hostile."""
    history = [
        event(rng, "segment_alloc", 0, 4096),
        event(rng, "alloc", 0, 600),
        event(rng, "alloc", 1024, 1000),
        event(rng, "free_requested", 0, 600),
        event(rng, "free_completed", 0, 600),
        event(rng, "oom", 0, 1 << 30) | {"device_free": 1 << 20},
    ]
    blocks = [
        {"size": 1024, "state": "inactive"},
        {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": history[2]["frames"]},
        {"size": 2048, "state": "inactive"},
    ]
    return {
        "segments": [{"device": 0, "address": ADDRESS, "total_size": 4096, "stream": 0, "blocks": blocks}],
        "device_traces": [history],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": json_text_of(rng), json_text_of(rng): json_text_of(rng)},
        "stalloc": {"devices": {"0": {"notes": [text_of(rng), text_of(rng)], "source": text_of(rng)}}},
    }


def write_snapshot(path, rng, **more):
    path.write_bytes(pickle.dumps(snapshot(rng) | more))


def write_trace(path, rng):
    """The same as a trace of stalloc, whose header says anything."""
    plain = path.with_name("plain.pickle")
    write_snapshot(plain, rng)
    info = {"source": text_of(rng), "file": text_of(rng), "notes": [text_of(rng) for _ in range(3)]}
    traces = [
        trace.replace(info=trace.info | info | {"device_name": text_of(rng)}, names=(text_of(rng),))
        for trace in load_traces(plain)
    ]
    plain.unlink()
    save_traces(path.with_name("t.trace.npz"), traces)
    path.with_name("t.trace.npz").rename(path)


def write_kineto(path, rng):
    def memory(size, address, time):
        args = {"Device Type": 1, "Device Id": 0, "Bytes": size, "Addr": address, "Ev Idx": time}
        return {"ph": "i", "name": "[memory]", "ts": time, "args": args | {"Total Allocated": 4096}}

    step = {"ph": "X", "cat": "user_annotation", "name": json_text_of(rng), "ts": 0, "dur": 3}
    content = {
        "deviceProperties": [{"id": 0, "name": json_text_of(rng), "totalGlobalMem": 1 << 33}],
        "stalloc_notes": [json_text_of(rng) for _ in range(3)],
        "traceEvents": [step, memory(512, 64, 0), memory(1024, 1024, 1), memory(-512, 64, 2)],
    }
    path.write_text(json.dumps(content))


def write_csv(path, rng):
    def cell():
        return '"' + json_text_of(rng).replace('"', '""').replace("\n", " ").replace("\r", " ") + '"'

    twice = cell()
    path.write_text(f"id,lower,upper,size\n{twice},0,5,64\n{rng.choice([cell(), twice])},1,3,128\n")


WRITERS = {
    "s.pickle": write_snapshot,
    "s.trace.npz": write_trace,
    "s.json": write_kineto,
    "s.csv": write_csv,
}


@variants("rounds", [2, 6])
@pytest.mark.parametrize("name", WRITERS)
def test_no_verb_lets_text_of_a_file_steer_the_terminal(tmp_path, capsys, name, rounds):
    rng = random.Random(f"{SEED} {name}")
    done = 0
    for _ in range(rounds):
        file, other = tmp_path / f"a {name}", tmp_path / f"b {name}"
        WRITERS[name](file, rng)
        WRITERS[name](other, rng)
        for arguments in (
            ["stats", str(file), str(other)],
            ["explain", str(file)],
            ["simulate", str(file)],
            ["plan", str(file), "-o", str(tmp_path / "p.plan.npz")],
            ["validate", str(tmp_path / "p.plan.npz"), str(file)],
            ["diff", str(file), str(other)],
            ["convert", "--force", str(file), str(tmp_path / "c.json")],
            ["convert", "--force", str(file), str(tmp_path / "c.pickle")],
            ["stats", str(file), "--json", "-"],
        ):
            done += check(capsys, arguments)[0] == 0
    assert done > 4 * rounds


def test_text_of_a_plan_does_not_steer_the_terminal(tmp_path, capsys):
    rng = random.Random(SEED)
    file, path = tmp_path / "s.csv", tmp_path / "p.plan.npz"
    file.write_text("id,lower,upper,size\n0,0,5,64\n1,1,3,128\n")
    (made,) = map(plan, load_traces(file))
    save_plans(path, [made])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(np.load(path)["header"].tobytes())
    for _ in range(40):
        changed = json.loads(json.dumps(header))
        entry = rng.choice([changed, changed["plans"][0]])
        entry[rng.choice(sorted(entry))] = rng.choice([text_of(rng), {text_of(rng): text_of(rng)}, [text_of(rng)]])
        changed["plans"] = changed["plans"] if isinstance(changed["plans"], list) else [changed["plans"]]
        damaged = dict(members)
        if rng.random() < 0.5:
            damaged["header.npy"] = _npy(json.dumps(changed).encode())
        else:
            name = rng.choice(sorted(members))
            damaged[json_text_of(rng).replace("/", "") + name] = damaged.pop(name)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in damaged.items():
                archive.writestr(name, content)
        check(capsys, ["validate", str(path), str(file)])
        check(capsys, ["stats", str(path)])


def _npy(data):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(data)},), }}"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def test_damaged_files_are_quoted_without_steering_the_terminal(tmp_path, capsys):
    rng = random.Random(SEED)
    file = tmp_path / "s.json"
    refused = 0
    for _ in range(60):
        kind = rng.randrange(5)
        if kind == 0:  # an unknown action, a forbidden name
            content = snapshot(rng)
            content["device_traces"][0][1]["action"] = json_text_of(rng)
            file.write_bytes(pickle.dumps(content))
        elif kind == 1:
            file.write_bytes(b"c" + json_text_of(rng).replace("\n", "").encode() + b"\nsystem\n.")
            file.write_bytes(b"\x80\x02" + file.read_bytes())
        elif kind == 2:
            file.write_text(f"id,lower,upper,size\n0,{json_text_of(rng)},3,{json_text_of(rng)}\n")
        elif kind == 3:
            file.write_text(f'{{"traceEvents": [{{"name": "[memory]", "ts": {json.dumps(text_of(rng))}}}]}}')
        else:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(
                    "header.npy", _npy(json.dumps({"format": "stalloc trace", "schema": text_of(rng)}).encode())
                )
        refused += check(capsys, ["stats", str(file)])[0] == 2
    assert refused > 40


@variants("rounds", [3, 12])
def test_names_of_files_do_not_steer_the_terminal(tmp_path, capsys, rounds):
    rng = random.Random(SEED)
    write_snapshot(tmp_path / "s.pickle", rng, allocator_settings={})
    data = (tmp_path / "s.pickle").read_bytes()
    for _ in range(rounds):
        name = os.fsencode(argument_text_of(rng).replace("/", ""))[:200]
        folder = tmp_path / os.fsdecode(name + b"\xff")
        folder.mkdir(exist_ok=True)
        file = folder / os.fsdecode(name + b".pickle")
        file.write_bytes(data)
        for arguments in (
            ["stats", str(file)],
            ["explain", str(file)],
            ["simulate", str(file)],
            ["plan", str(file), "-o", str(folder / "p.plan.npz"), "--csv", f"{file}.csv"],
            ["validate", str(folder / "p.plan.npz"), str(file)],
            ["diff", str(file), str(file)],
            ["convert", "--force", str(file), f"{file}.json"],
        ):
            check(capsys, arguments, exit_code=0)
        for arguments in (
            ["stats", str(folder)],
            ["explain", f"{file}.nothing"],
            ["simulate", f"{file}\x1b.nothing"],
            ["plan", str(file), "-o", str(folder)],
            ["validate", str(file), str(file)],
            ["diff", str(file), f"{file}.nothing"],
            ["convert", str(file), f"{file}\x1b"],
            ["convert", str(file), str(file)],
            ["run", f"{file}.nothing"],
            ["record", "-o", str(file), str(file)],
            ["dryrun", str(folder)],
        ):
            check(capsys, arguments, exit_code=125 if arguments[0] in ("run", "record") else 2)


@variants("rounds", [3, 10])
def test_arguments_do_not_steer_the_terminal(tmp_path, capsys, rounds):
    rng = random.Random(SEED)
    file = str(tmp_path / "s.pickle")
    write_snapshot(tmp_path / "s.pickle", rng)
    for _ in range(rounds):
        text = argument_text_of(rng) + "\x1b"
        for arguments in (
            [text],
            ["stats", file, f"--{text}"],
            ["stats", file, "--align", text],
            ["explain", file, "--at", text],
            ["simulate", file, "--allocator", text],
            ["simulate", file, "--conf", text],
            ["simulate", file, "--capacity", text],
            ["plan", file, "--method", text],
            ["plan", file, "--fixed", text],
            ["diff", file, file, "--fail-over", text],
            ["convert", file, str(tmp_path / "o"), "--to", text],
            ["run", "--gpu", text, __file__],
            ["dryrun", "--memory", text, __file__],
            ["bench", text],
        ):
            check(capsys, arguments, exit_code=125 if arguments[0] == "run" else 2)


@variants("rounds", [3, 10])
def test_settings_of_the_environment_do_not_steer_the_terminal(capsys, monkeypatch, rounds):
    rng = random.Random(SEED)
    for _ in range(rounds):
        monkeypatch.setenv("STALLOC_EXAMPLE", argument_text_of(rng))
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", argument_text_of(rng) + ":" + "\x1b[2J")
        check(capsys, ["info"], exit_code=0)


@pytest.mark.slow
def test_a_table_goes_to_a_terminal_that_knows_no_unicode(tmp_path, run_program):
    write_snapshot(tmp_path / "s.pickle", random.Random(SEED), allocator_settings={})
    program = "import sys; from stalloc.cli import main; sys.exit(main(sys.argv[1:]))"
    for verb in (["stats"], ["diff", str(tmp_path / "s.pickle")], ["explain"]):
        done = run_program(program, *verb, str(tmp_path / "s.pickle"), PYTHONIOENCODING="ascii:strict")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()


def test_the_start_up_hook_and_the_allocator_speak_in_one_harmless_line(run_program):
    hostile = "\x1b[2J\nFORGED\u202e"
    program = "from stalloc.integrations.startup import arm; arm()"
    for variable in ("STALLOC", "STALLOC_DEVICE", "STALLOC_STREAMS", "STALLOC_ARENA"):
        done = run_program(program, **({"STALLOC": "1"} | {variable: hostile}))
        assert done.returncode == 0
        assert done.stderr.startswith("stalloc: ")
        assert done.stderr.count("\n") == 1
        assert "\x1b" not in done.stderr


def test_sentences_are_lost_where_nobody_listens(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    say("nobody hears this")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv1.weight", "conv1.weight"),
        ("数据 Ünï", "数据 Ünï"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("\udcff", "\\udcff"),
        ("\u200d\u2028\x85\x7f", "\\u200d\\u2028\\x85\\x7f"),
        ("\ue0b0\u3000", "\ue0b0\u3000"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    assert printable.printable(text) == shown
    assert printable.printable(shown) == shown


def test_long_names_are_cut_in_the_middle():
    rng = random.Random(SEED)
    for limit in (10, 200, 1000):
        for _ in range(50):
            shown = printable.printable("begin" + text_of(rng) * 300 + "\x1b" * rng.randint(0, 300) + "end", limit)
            assert len(shown) <= limit
            assert printable.printable(shown, limit) == shown
            assert shown.startswith("begin")
            assert shown.endswith("end")
    assert printable.printable("x" * 200) == "x" * 200


def test_errors_that_a_program_prints_itself_are_harmless_too():
    error = BadInputError("a\x1b[31m\nb")
    assert str(error) == "a\\x1b[31m\\nb"
