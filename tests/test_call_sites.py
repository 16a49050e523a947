"""Call sites under stalloc: who asked for a request, in recordings, snapshots and the text of an error, never a wrong
one, and nothing at all unless somebody asks.
"""

import json
import os
import re
from pathlib import Path

import pytest
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.trace import load_traces
from stalloc.trace.sites import read_sites, site_name, site_names

BEGIN = """
import json
from stalloc import device, integrations
device.activate("virtual", device.VirtualGPU(name="small", total_bytes=1 << 30))
runtime = integrations.install(
    device="virtual", settings=integrations.Settings(plan=False, keep_recording=True, call_sites=SITED)
)
MIB = 1 << 20
def names(rows=None):
    from stalloc.trace.sites import site_names
    trace = runtime.controllers[0].recording.trace()
    return site_names(trace, range(trace.num_requests) if rows is None else rows)
"""
TORCH = "import torch\ndef ask(n):\n    return torch.empty(n, dtype=torch.uint8, device='cuda')\n"


def begin(*, sited: bool = True) -> str:
    return BEGIN.replace("SITED", str(sited))


def test_a_recording_names_the_lines_of_torch_and_cupy(tmp_path: Path, cuda_torch: None, cupy_installed: None) -> None:
    program = tmp_path / "both.py"
    program.write_text(
        "import cupy, torch\n"
        "def model():\n"
        "    return torch.empty(1 << 20, device='cuda')\n"
        "def array():\n"
        "    return cupy.empty(1 << 20, dtype='f4')\n"
        "kept = [model() for _ in range(3)], array()\n",
        encoding="utf-8",
    )
    trace = str(tmp_path / "both.trace.npz")
    record = ["record", "--device", "virtual", "-o", trace, str(program)]
    done = run_stalloc(*record)
    assert done.returncode == 0, done.stderr
    (recorded,) = load_traces(trace)
    assert site_names(recorded, range(recorded.num_requests)) == ["both.py:3 model"] * 3 + ["both.py:5 array"]
    sites = read_sites(recorded)
    assert sites is not None
    assert site_name(sites.stack(int(sites.site[-1])), depth=2) == "both.py:5 array from both.py:6 <module>"


def test_an_address_that_is_used_again_belongs_to_who_has_it_now(run_checks, cuda_torch: None) -> None:
    found = run_checks(
        begin()
        + TORCH
        + """
import random
def one(n): return ask(n)
def two(n): return ask(n)
random.seed(5)
live, asked = [], []
for _ in range(3000):
    if live and random.random() < 0.5:
        live.pop(random.randrange(len(live)))
    else:
        function = random.choice([one, two])
        live.append(function(random.choice([512, 4096, MIB])))
        asked.append(function.__name__)
from stalloc.trace.sites import read_sites, site_name
trace = runtime.controllers[0].recording.trace()
sites = read_sites(trace)
told = [sites.stack(number)[1].name for number in sites.site.tolist()]
print(json.dumps([asked == told, len(asked), sites.num_stacks]))
"""
    )
    assert found[0]
    assert found[1] > 1000
    assert found[2] == 2


def test_threads_and_code_made_at_run_time_are_told_apart(run_checks, cuda_torch: None) -> None:
    found = run_checks(
        begin()
        + TORCH
        + """
import gc, threading
def worker(kept):
    kept.append(ask(MIB))
kept = []
for _ in range(4):
    thread = threading.Thread(target=worker, args=(kept,)); thread.start(); thread.join()
for number in range(200):  # code objects come and go, at the same addresses
    space = {"ask": ask}
    exec(compile(f"def made_{number}(): return ask(512)\\nx = made_{number}()", "<made>", "exec"), space)
    kept.append(space["x"]); del space; gc.collect() if number % 50 == 0 else None
from stalloc.trace.sites import read_sites
trace = runtime.controllers[0].recording.trace()
sites = read_sites(trace)
print(json.dumps([[frame.name for frame in sites.stack(number)][1] for number in sites.site.tolist()]))
"""
    )
    assert found == ["worker"] * 4 + [f"made_{number}" for number in range(200)]


def test_a_snapshot_under_stalloc_has_the_stacks_of_torch_s(run_checks, cuda_torch: None) -> None:
    found = run_checks(
        """
import json
import stalloc
runtime = stalloc.install(device="virtual")
import torch
def before(): return torch.empty(1 << 20, device="cuda")
def after(): return torch.empty(1 << 21, device="cuda")
kept = [before()]
torch.cuda.memory._record_memory_history()
kept.append(after())
snapshot = torch.cuda.memory._snapshot()
def lines(frames): return [frame["name"] for frame in frames][:1]
blocks = {block["requested_size"]: lines(block["frames"])
          for segment in snapshot["segments"] for block in segment["blocks"] if block["requested_size"]}
events = [lines(event["frames"]) for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
torch.cuda.memory._record_memory_history(None)
print(json.dumps([blocks, events, runtime.call_sites.is_on]))
"""
    )
    blocks, events, is_on = found
    assert blocks == {str(4 << 20): [], str(8 << 20): ["after"]}
    assert events == [["after"]]
    assert not is_on


ENDLESS = """
def keep(held):
    while True:
        held.append(ask(100 * MIB))
def small(): return [ask(MIB) for _ in range(3)]
try:
    held = small()
    keep(held)
except torch.OutOfMemoryError as error:
    text = str(error)
"""


def test_the_text_of_an_error_names_the_lines_that_hold_most(tmp_path: Path, run_checks, cuda_torch: None) -> None:
    trace = str(tmp_path / "oom.trace.npz")
    save = "from stalloc.trace import save_traces\n"
    save += f"save_traces({trace!r}, [runtime.controllers[0].recording.trace()])\n"
    text = run_checks(begin() + TORCH + ENDLESS + save + "print(json.dumps(text))")
    assert "Tried to allocate 100.00 MiB (104857600 bytes) at <string>:" in text
    assert re.search(r"Most is held: 1000\.00 MiB by 10 blocks of <string>:\d+ ask, ", text) is None  # the line is one
    assert re.search(r"Most is held: 1003\.00 MiB by 13 blocks of <string>:\d+ ask\. ", text)
    assert "Next: `stalloc" in text
    (recorded,) = load_traces(trace)
    free = re.search(r"Free: ([\d.]+) MiB on the device", text)
    assert free is not None
    assert int(recorded.address[recorded.action == 7][-1]) == round(float(free[1])) << 20 > 0


def test_without_call_sites_the_error_names_the_line_that_asked_and_sizes(run_checks, cuda_torch: None) -> None:
    text, is_on = run_checks(
        begin(sited=False) + TORCH + ENDLESS + "print(json.dumps([text, runtime.call_sites.is_on]))"
    )
    assert not is_on
    assert "(104857600 bytes) at <string>:" in text
    assert "Most is held: 1000.00 MiB by 10 of 100.00 MiB, 3.00 MiB by 3 of 1.00 MiB. " in text


def test_a_program_on_its_plan_pays_for_no_call_sites(run_checks, cuda_torch: None) -> None:
    """The word by which torch calls holds the core's own address."""
    on, same = run_checks(
        """
import ctypes, json
import stalloc
runtime = stalloc.install(device="virtual")
import torch
torch.empty(5, device="cuda")
word = ctypes.c_int64.from_address(runtime.call_sites.malloc_word).value
print(json.dumps([runtime.call_sites.is_on, word == runtime.entries[0]]))
"""
    )
    assert not on
    assert same


def test_explain_says_who_asked_and_what_was_free_in_a_recording_of_stalloc_s(
    tmp_path: Path, cuda_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    program, trace = tmp_path / "oom.py", str(tmp_path / "oom.trace.npz")
    program.write_text("MIB = 1 << 20\n" + TORCH + "kept = []\nwhile True:\n    kept.append(ask(100 * MIB))\n")
    record = ["record", "--device", "virtual", "--memory", "1GiB", "-o", trace, str(program)]
    done = run_stalloc(*record)
    assert done.returncode == 1
    assert f"next: stalloc top {trace}" in done.stdout
    assert main(["explain", "--json", "-", trace]) == 0
    error = json.loads(capsys.readouterr().out)["devices"][0]
    assert error["asked_by"] == "oom.py:4 ask"
    assert error["verdict"] == "capacity"
    assert 0 < error["device_free_bytes"] < 100 << 20


def test_a_run_that_asks_for_stacks_names_who_holds_memory(tmp_path: Path, cupy_installed: None) -> None:
    program = tmp_path / "fills.py"
    program.write_text(
        "import cupy\nkept = []\ndef keep():\n    kept.append(cupy.empty(100 << 20, 'u1'))\nwhile True:\n    keep()\n",
        encoding="utf-8",
    )
    run = ["run", "--stacks", "--device", "virtual", "--memory", "1GiB", str(program)]
    done = run_stalloc(*run, variables=os.environ | {"STALLOC_CACHE": "off"})
    assert done.returncode == 1
    assert "Tried to allocate 100.00 MiB (104857600 bytes) at fills.py:4 keep" in done.stderr
    assert re.search(r"Most is held: \d+\.00 MiB by \d+ blocks of fills\.py:4 keep\. ", done.stderr)
    assert f"next: stalloc dryrun {program}" in done.stdout


def test_the_last_requests_are_known_and_what_lives_from_before_if_somebody_looked(run_checks) -> None:
    first, later, unseen = run_checks(
        begin(sited=False)
        + """
import ctypes
from stalloc.runtime.call_sites import CallSites
sites, state = CallSites(runtime.entries[0], max_calls=64), runtime.controllers[0].state.address
sites.begin()
malloc = ctypes.PYFUNCTYPE(*[ctypes.c_int64] * 4)(ctypes.c_int64.from_address(sites.malloc_word).value)
def early():
    return malloc(state, 4096, 0)
def late():
    for _ in range(60):
        address = malloc(state, 4096, 0)
    return address
held = [early()]
sites.keep_live({state: held})
last = late()
seen = sites.names_at(state, [*held, last])
late()
print(json.dumps([seen, sites.names_at(state, held), sites.is_look_due]))
"""
    )
    assert [name.split()[-1] for name in first] == ["early", "late"]
    assert later == ["unknown"]
    assert unseen
