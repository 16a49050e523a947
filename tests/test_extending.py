"""docs/extending*.md: the examples are taken from the pages and run, and what they say is listed has to be listed."""

import argparse
import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

from stalloc.compiled import inner
from stalloc.core.record_types import LineStart, Record, Words, offset_of, table, view_at
from stalloc.core.records import State, Total
from stalloc.errors import BadInputError
from stalloc.fitting import Candidate
from stalloc.fitting.observation import BlockSeen, CallSeen, OperationSeen, ProgramSeen
from stalloc.fitting.proposals import Base, Known
from stalloc.fitting.trials import Measured
from stalloc.planner import plan, validate
from stalloc.replay import Events, Kind
from stalloc.replay.blocks import new_segment
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import NoSettings, read_settings
from stalloc.runtime import decisions
from stalloc.techniques.technique_settings import TechniqueSettings

DOCS = Path(__file__).parents[1] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("extending.md", "extending-techniques.md"))


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Import the example of the page that belongs into a file of this name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name, is_imported=True):
        blocks = re.findall(r"```python\n(# (\S+)\n.*?)```", PAGES, re.DOTALL)
        (code,) = [code for code, path in blocks if Path(path).stem == name]
        (tmp_path / f"{name}.py").write_text(code.partition("\n")[2])  # the docstring is first in the real file
        importlib.invalidate_caches()
        return importlib.import_module(name) if is_imported else None

    return load


@pytest.fixture
def checks_of(example, tmp_path, run_checks):
    """Run checks on the virtual GPU that import the example of the page that belongs into a file of this name."""

    def run(name, checks):
        example(name, is_imported=False)
        return run_checks(_ON_VIRTUAL_GPU + checks, str(tmp_path))

    return run


_ON_VIRTUAL_GPU = """
import contextlib, json, stalloc, sys
stalloc.install(device="virtual")
import torch
sys.path.insert(0, sys.argv[1])
"""


def _events(kinds, requests, sizes):
    return Events(
        kind=np.array(kinds, np.int8),
        request=np.array(requests),
        event=np.arange(len(kinds)),
        size=np.array(sizes),
        stream=np.zeros(len(sizes), np.int64),
    )


def test_the_allocator_model_replays_a_program(example):
    kind = example("kept_whole").KeptWhole
    model = kind(read_settings(kind.name, kind.settings_type, "granule:1KiB"), 16 << 10)
    alloc, free = Kind.ALLOC, Kind.FREE_COMPLETED
    events = _events([alloc, free, alloc, free, alloc, free, alloc], [0, 0, 1, 1, 2, 2, 3], [5000, 3000, 2000, 12_000])
    fed = model.feed(events)
    kept = [5120] * 4  # 3000 bytes get them, 2000 do not: they are more than twice as many
    assert fed.reserved_bytes.tolist() == [*kept, 5120 + 2048, 5120 + 2048, 12_288]
    assert fed.failed == -1
    assert model.counters().more == {"largest": 12_288}
    assert model.counters().retries == 1
    assert model.blocks().size_bytes.tolist() == [12_288]
    small = kind(capacity_bytes=8 << 10)
    assert small.feed(events).failed == 6
    with pytest.raises(BadInputError, match="granule of kept_whole is 'x'"):
        read_settings(kind.name, kind.settings_type, "granule:x")


def test_a_model_needs_neither_settings_nor_counters(example):
    driver = driver_of("bare", own_type(NoSettings), allocate=_plain)
    bare = type("Bare", (TableModel,), {"name": "bare", "own": own_type(NoSettings), "driver": staticmethod(driver)})
    assert bare().feed(_events([Kind.ALLOC], [0], [100])).reserved_bytes.tolist() == [100]


@inner()
def _plain(t, m, request, size, stream):
    return new_segment(t, size, stream, 0)


@inner()
def _too_many(t, m, request, size, stream):
    block = 0
    for _ in range(1 << 16):
        block = new_segment(t, size, stream, 0)
    return block


def test_a_model_that_needs_more_rows_than_it_says_ends_with_an_error(example):
    events = _events([Kind.ALLOC], [0], [100])
    kind = example("kept_whole").KeptWhole
    greedy = type("Greedy", (kind,), {"driver": staticmethod(driver_of("greedy", kind.own, allocate=_too_many))})
    with pytest.raises(IndexError, match="has_room"):
        greedy().feed(events)


def test_the_trace_source_reads_what_can_be_planned(example, tmp_path):
    source = example("plain_log")
    data = b"alloc 1 1000\nalloc 2 2000\nfree 1\nalloc 3 1000\nfree 2\nfree 3\n"
    assert source.looks_like_plain_log(data)
    trace = source.read_plain_log(tmp_path / "a.log", data)
    assert (trace.num_requests, trace.num_events) == (3, 6)
    made = plan(trace)
    assert made.peak_bytes == 1024 + 2048
    assert validate(made, trace).ok
    with pytest.raises(BadInputError, match=r"a\.log: line 2 is neither"):
        source.read_plain_log(tmp_path / "a.log", b"alloc 1 1000\nfree 2\n")
    with pytest.raises(BadInputError, match=r"a\.log: line 1 asks for more than any GPU has"):
        source.read_plain_log(tmp_path / "a.log", b"alloc 1 99999999999999999\n")
    for damaged in (b"alloc " + 24 * b"9" + b" 100\n", b"alloc 1 " + 5000 * b"9" + b"\n"):
        with pytest.raises(BadInputError, match=r"a\.log: line 1 has a number that is too long"):
            source.read_plain_log(tmp_path / "a.log", damaged)


def test_the_verb_parses_calls_and_prints(example, tmp_path, capsys):
    verb = example("largest")
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n0,0,10,1000\n1,5,10,3000\n")
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    assert verb.run(parser.parse_args([str(tmp_path / "p.csv")])) == 0
    assert capsys.readouterr().out == "device 0: 3000 B\n"
    assert verb.run(parser.parse_args([str(tmp_path / "p.csv"), "--json", "-"])) == 0
    assert json.loads(capsys.readouterr().out) == {"json_version": 1, "largest_bytes": {"0": 3000}}


def test_the_technique_proposes_until_something_fits(example):
    block = BlockSeen(0, "block", "Block", "", [OperationSeen("aten.mm.default", 1.0, 512)])
    known = Known(100, step=ProgramSeen([block] * 5, [CallSeen(row, 512) for row in range(5)], 1.0, 3))
    proposals = example("by_halves").by_halves(known, Base())
    half = next(proposals)
    assert list(half.proposed.choices) == [0, 2, 4]
    whole = proposals.send(Candidate(what=half.what, technique=half.technique, needed_bytes=101))
    assert list(whole.proposed.choices) == [0, 1, 2, 3, 4]
    with pytest.raises(StopIteration):
        proposals.send(Candidate(what=whole.what, technique=whole.technique, needed_bytes=100))


@pytest.mark.usefixtures("cuda_torch")
def test_the_technique_that_does_more_is_put_in_force_and_proposed(example, checks_of):
    found = checks_of(
        "step_by_tensor",
        """
from step_by_tensor import step_by_tensor
said = []
step_by_tensor(said.append)
weights = [torch.nn.Parameter(torch.ones(3))]
made = [torch.optim.AdamW(weights), torch.optim.AdamW(weights, foreach=True), torch.optim.LBFGS(weights)]
print(json.dumps({"foreach": [one.param_groups[0].get("foreach") for one in made], "said": len(said)}))
""",
    )
    assert found == {"foreach": [False, True, None], "said": 1}
    kind = dataclasses.make_dataclass(
        "With", [("step_by_tensor", bool, False)], bases=(TechniqueSettings,), frozen=True
    )
    tried = example("tensor_step_search").step_by_tensor(Known(100), Base(kind()), is_named=True)
    assert next(tried).settings.step_by_tensor
    assert tried.send("there is no GPU.") == "the optimizer's step stays one of all tensors: there is no GPU"


@pytest.mark.usefixtures("cuda_torch")
def test_the_technique_that_packs_what_is_saved_changes_no_gradient_and_takes_less(checks_of):
    found = checks_of(
        "masks_as_bits",
        """
from masks_as_bits import MasksAsBits
def gradient(context, device, shape):
    torch.manual_seed(0)
    weights = torch.randn(shape, device=device, requires_grad=True)
    with context:
        results = [torch.nn.functional.dropout(weights * number, 0.3) for number in (2.0, 3.0)]
        results.append(torch.where(results[0][1:] > 0.5, results[1][1:], 0.0))
    held = torch.cuda.memory_allocated()
    sum(result.sum() for result in results).backward()
    return weights.grad, held
shape = (1031, 1033)
ours, theirs = (gradient(one, "cpu", shape)[0] for one in (MasksAsBits("cpu"), contextlib.nullcontext()))
less, more = (gradient(one, "cuda", (4096, 1024))[1] for one in (MasksAsBits(), contextlib.nullcontext()))
print(json.dumps({"equal": torch.equal(ours, theirs), "zeros": bool((ours == 0).any()), "saved": more - less}))
""",
    )
    assert (found["equal"], found["zeros"]) == (True, True)
    assert found["saved"] > 3 * 0.8 * (4 << 20), "seven eighths of three masks"


def test_the_technique_that_costs_time_is_tried_by_its_name_and_says_its_seconds(example):
    kind = dataclasses.make_dataclass("With", [("masks_as_bits", bool, False)], bases=(TechniqueSettings,), frozen=True)
    technique = example("mask_search").masks_as_bits
    known = Known(100, step=ProgramSeen([], [], 1.0, 3))
    assert list(technique(known, Base(kind()), is_named=False)) == []
    tried = technique(known, Base(kind()), is_named=True)
    work = next(tried)
    assert (work.under, work.settings.masks_as_bits) == ("timed", True)
    way = tried.send(Measured(seen={"step_seconds": 1.25}))
    assert (way.proposed.seconds, way.base.settings.masks_as_bits) == (0.25, True)
    failing = technique(known, Base(kind()), is_named=True)
    next(failing)
    assert failing.send(Measured(failure="there is no GPU")) == "masks stay as they are: there is no GPU"


def test_every_file_that_the_page_names_is_there():
    prose = re.sub(r"```.*?```", "", PAGES, flags=re.DOTALL)
    root = DOCS.parent
    named = set(re.findall(r"`((?:[\w]+/)+[\w.]*)`", prose))
    assert len(named) > 15
    assert [name for name in named if not (root / name).exists() and not (root / "stalloc" / name).exists()] == []


def test_every_number_of_the_runtime_is_used_by_a_decision_and_every_decision_is_tested():
    thresholds = decisions.t
    folder = Path(decisions.__file__).parent
    used = set(re.findall(r"\bt\.([A-Z_]+)", (folder / "decisions.py").read_text()))
    others = [path for path in folder.glob("*.py") if path.stem not in ("decisions", "thresholds")]
    used |= {name for path in others for name in re.findall(r"thresholds\.([A-Z_]+)", path.read_text())}
    numbers = {name for name, value in vars(thresholds).items() if isinstance(value, int | float)}
    assert used == numbers
    functions = {name for name, value in vars(decisions).items() if inspect.isfunction(value)}
    tested = set(re.findall(r"\bd\.([a-z_]+)", (DOCS.parent / "tests" / "test_decisions.py").read_text()))
    assert {name for name in functions if not name.startswith("_")} <= tested


def test_a_field_may_be_added_to_a_record_of_the_core_anywhere():
    """What has to begin a line of the cache does, whatever stands before it, for Python and for compiled code."""

    class Grown(Record):
        more: int
        lock: int
        total: Total
        one: int
        mode: LineStart
        few: Annotated[Words, 3]

    lines = {name: offset_of(Grown, name) for name in ("more", "lock", "total", "one", "mode", "few")}
    assert lines == {"more": 0, "lock": 8, "total": 64, "one": 128, "mode": 192, "few": 200}
    rows = table(Grown, 2)
    rows["total"]["num_live"][1], rows["few"][1] = 5, [1, 2, 3]
    seen = view_at(Grown, rows.ctypes.data + rows.dtype.itemsize)
    assert (seen.total.num_live, list(seen.few)) == (5, [1, 2, 3])
    assert offset_of(State, "total") % 64 == offset_of(State, "hot.mode") % 64 == 0
