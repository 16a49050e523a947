"""`stalloc record --ops`: the program is not changed by it, and the trace knows who made and used what."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from test_report import columns_of
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.queues import Queue
from stalloc.cost.step_seconds import estimate_step
from stalloc.device import detect
from stalloc.lifespans import (
    cut_operations,
    find_steady_step,
    module_of_requests,
    operation_graph,
    reorder,
    repeated_blocks,
)
from stalloc.lifespans.operation_order import Lifespans, crossing_bytes
from stalloc.lifespans.roles import calls_of, within
from stalloc.lifespans.steady_step import outermost
from stalloc.trace import Trace, load_traces, save_traces
from stalloc.trace.operations import ACCESS_WRITTEN, Operations, RangeKind, Role, read_operations

PROGRAM = Path(__file__).parent / "programs" / "operations.py"
RECORDED_STEPS = 4
PARAMETERS = 3 * (2 * 64 + 64 * 256 + 256 + 256 * 64 + 64) + 64 + 1


@pytest.fixture(scope="module")
def recordings(tmp_path_factory, cuda_torch: None) -> dict[str, Trace]:
    """The same program recorded with and without operations."""
    folder = tmp_path_factory.mktemp("operations")
    return {how: run_recorded(folder / f"{how}.trace.npz", f"--{how}", PROGRAM) for how in ("stacks", "ops")}


def run_recorded(output: Path, option: str, program: Path) -> Trace:
    done = run_stalloc("record", option, "--device", "virtual", "-o", output, program)
    assert done.returncode == 0, done.stdout + done.stderr
    (trace,) = load_traces(output)
    return trace


@pytest.fixture(scope="module")
def trace(recordings: dict[str, Trace]) -> Trace:
    return recordings["ops"]


@pytest.fixture(scope="module")
def operations(trace: Trace) -> Operations:
    found = read_operations(trace)
    assert found is not None
    return found


def test_another_order_keeps_every_dependency_and_needs_no_more(trace: Trace, operations: Operations) -> None:
    step = find_steady_step(trace, operations)
    assert step is not None
    found = reorder(trace, operations, step)
    assert sorted(found.order.tolist()) == step.operations.tolist()
    place = {row: number for number, row in enumerate(found.order.tolist())}
    graph = operation_graph(trace, operations, step.operations)
    assert all(place[one] < place[other] for one, other in graph.edges)
    events = [0] * (step.end_event - step.begin_event + 1)
    for begin, end, size in zip(trace.start.tolist(), trace.end.tolist(), trace.size.tolist(), strict=True):
        if begin < step.end_event and end > step.begin_event:
            events[max(begin, step.begin_event) - step.begin_event] += size
            events[min(end, step.end_event) - step.begin_event] -= size
    assert found.peak_bytes <= found.early_peak_bytes <= found.program_peak_bytes
    assert found.program_peak_bytes == pytest.approx(np.cumsum(events).max(), rel=0.001)
    assert peak_of(found.lifespans) == found.peak_bytes
    assert peak_of(found.program_lifespans) == found.early_peak_bytes


def peak_of(lifespans: Lifespans) -> int:
    """The most that lives at once, counted naively."""
    changes = [*zip(lifespans.start, lifespans.size, strict=True), *zip(lifespans.end, -lifespans.size, strict=True)]
    return max(itertools.accumulate(int(size) for _, size in sorted(changes)))


BRANCHES = Path(__file__).parent / "programs" / "branches.py"


@pytest.mark.parametrize("name", ["-infer", pytest.param("", marks=pytest.mark.slow)])
def test_branches_need_less_one_by_one_and_a_program_in_that_order_does(
    name: str, tmp_path: Path, cuda_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the replay finds for branches that begin together is what a program that runs them one by one has."""
    told = {}
    for kind in ("inception", "by-branch"):
        path = tmp_path / f"{kind}.trace.npz"
        assert run_stalloc("record", "--ops", "--device", "virtual", "-o", path, BRANCHES, kind + name).returncode == 0
        assert main(["stats", str(path), "--order", "--json", str(tmp_path / "told.json")]) == 0
        told[kind] = json.loads((tmp_path / "told.json").read_text())["devices"][0]["operation_order"]
    found, by_hand = told["inception"], told["by-branch"]
    assert found["peak_bytes"] < 0.92 * found["early_peak_bytes"]
    assert found["planned_bytes"] < 0.92 * found["program_planned_bytes"]
    assert found["peak_bytes"] == pytest.approx(by_hand["program_peak_bytes"], rel=0.01), "as a run of that order says"
    assert by_hand["peak_bytes"] == by_hand["early_peak_bytes"], "no better order is found"
    shown = capsys.readouterr().out
    assert "in another order that keeps every dependency" in shown
    assert "no order was found that needs less" in shown


def test_swapped_parameters_are_those_of_the_record(trace: Trace, tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.trace.npz"
    save_traces(path, [trace])
    assert main(["swap", str(path), "--budget", "1MiB", "--gpu", "H100", "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    sizes = told["data"]["sizes"]
    assert sum(sizes) == 4 * PARAMETERS
    assert len(sizes) == 3 * 6 + 2
    chunks = told["patrickstar"]
    assert chunks["belady"]["to_device"] <= chunks["lru"]["to_device"]
    assert chunks["count"] * chunks["chunk_bytes"] >= sum(size for size in sizes if size <= chunks["chunk_bytes"])
    for packs in (told["harmony"]["forward"], told["harmony"]["backward"]):
        assert sorted(layer for begin, end in packs for layer in range(begin, end)) == [0, 1, 2, 3, 4], "ends included"
    assert told["stronghold"]["num_layers"] == 5, "ends included"
    assert told["angel"] is None  # a page is larger than this budget
    near = told["smart_infinity"]
    assert near["moved_bytes"] == 2 * sum(sizes) <= near["host_moved_bytes"] / 2
    assert main(["swap", str(path), "--budget", "8MiB", "--drives", "2", "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    assert told["angel"]["count"] * (4 << 20) - sum(sizes) == told["angel"]["empty_bytes"]
    assert told["smart_infinity"]["seconds"] == pytest.approx(2 * near["seconds"]), "half of the drives"
    assert main(["swap", str(path), "--budget", "1KiB"]) == 0
    said = capsys.readouterr().out
    assert "PatrickStar: no size of chunks has room for what is needed at once" in said
    assert "Angel-PTM: the pages that are needed at once have no room" in said
    (least,) = re.findall(r"Harmony, Mobius: the least budget is (\d+) MiB, which block \d of 3 needs in its", said)
    assert main(["swap", str(path), "--budget", f"{least}MiB", "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    assert told["harmony"] is not None
    assert not [note for note in told["notes"] if "least budget" in note or "in host memory itself" in note]
    save_traces(path, [trace.replace(info=trace.info | {"host_bytes": 3 << 20})])
    assert main(["swap", str(path), "--budget", "8MiB"]) == 0
    assert "the program keeps 3.00 MiB in host memory itself" in capsys.readouterr().out


def test_ranks_on_one_link_swap_what_the_record_saves_for_backward(trace: Trace, tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.trace.npz"
    save_traces(path, [trace])

    def told(budget: str, ranks: int) -> dict:
        assert main(["swap", str(path), "--budget", budget, "--ranks", str(ranks), "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)["devices"][0]["tmo"]

    wide_bytes = 4 * 128 * 256
    sizes = [one["size_bytes"] for one in told("1MiB", 2)["tensors"]]
    assert sizes == [wide_bytes] * 4, "what gelu and the last linear layer are given, in two layers; others are small"
    found = told("384KiB", 3)
    assert len(found["in_turn"]["sets"]) == 3
    assert (found["at_once"]["most_at_once"], found["in_turn"]["most_at_once"]) == (3, 1)
    assert found["in_turn"]["moved_bytes"] > 0
    assert told("1GiB", 3)["in_turn"]["moved_bytes"] == 0
    assert main(["swap", str(path), "--budget", "64KiB"]) == 0
    assert "TMO: what the backward pass uses at once has no room" in capsys.readouterr().out
    assert main(["swap", str(path), "--budget", "1MiB", "--ranks", "0"]) == 2
    assert "--ranks is 0: give a number from 1 to 64." in capsys.readouterr().err


def test_what_shows_no_operations_cannot_be_swapped(recordings: dict[str, Trace], tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.trace.npz"
    save_traces(path, [recordings["stacks"]])
    assert main(["swap", str(path), "--budget", "1GiB"]) == 2
    assert "no whole step with operations: record it with stalloc record --ops" in capsys.readouterr().err


def bytes_of(trace: Trace, rows: np.ndarray) -> int:
    return int(trace.size[rows].sum())


def test_the_program_asks_for_the_same_in_the_same_order(recordings: dict[str, Trace]) -> None:
    traced, untraced = recordings["ops"], recordings["stacks"]
    assert np.array_equal(traced.action, untraced.action)
    assert np.array_equal(traced.event_size, untraced.event_size)
    assert np.array_equal(traced.end - traced.start, untraced.end - untraced.start)


def test_every_request_of_the_recorded_steps_has_a_maker(trace: Trace, operations: Operations) -> None:
    covered = trace.start < trace.mark_event[RECORDED_STEPS - 1]
    assert np.all(operations.made_by[covered] >= 0)
    maker = operations.made_by[covered]
    assert np.all(operations.begin[maker] <= trace.start[covered])
    assert np.all(trace.start[covered] < operations.end[maker])
    assert "operations are those of the first 4 of 6 steps" in trace.info["notes"]
    assert np.all(operations.role[~covered & (operations.made_by < 0)] == Role.UNKNOWN)


def test_what_is_read_lives(trace: Trace, operations: Operations) -> None:
    begin = operations.begin[operations.access_op]
    assert np.all(trace.start[operations.access_request] < begin)
    assert np.all(trace.end[operations.access_request] >= begin)
    assert len(begin) > 100


def test_roles_have_the_bytes_that_the_program_s_own_arithmetic_says(trace: Trace, operations: Operations) -> None:
    by_role = {role: np.flatnonzero(operations.role == role) for role in Role}
    assert bytes_of(trace, by_role[Role.PARAMETER]) == 4 * PARAMETERS
    assert bytes_of(trace, by_role[Role.GRADIENT]) == RECORDED_STEPS * 4 * PARAMETERS
    assert bytes_of(trace, by_role[Role.OPTIMIZER_STATE]) == 2 * 4 * PARAMETERS  # the counts of steps are on the CPU
    assert bytes_of(trace, by_role[Role.INPUT]) >= RECORDED_STEPS * 4 * 128 * 64
    saved = {operations.name_of(row) for row in operations.made_by[by_role[Role.SAVED_ACTIVATION]]}
    assert {"aten::addmm", "aten::native_layer_norm", "aten::native_dropout"} <= saved
    step = find_steady_step(trace, operations)
    assert step is not None
    held = np.isin(step.held, np.flatnonzero(np.isin(operations.role, (Role.PARAMETER, Role.OPTIMIZER_STATE))))
    assert bytes_of(trace, step.held[held]) == 3 * 4 * PARAMETERS


def test_the_backward_pass_is_in_the_modules_of_its_operations(trace: Trace, operations: Operations) -> None:
    names = [module.name for module in operations.modules]
    assert {"", "layers", "layers.0.up", "head"} <= set(names)
    (blocks,) = repeated_blocks(operations)
    assert (blocks.kind, blocks.names) == ("Layer", ("layers.0", "layers.1", "layers.2"))
    # the last one is run again in each backward pass
    assert [len(calls_of(operations, row)) for row in blocks.rows.tolist()] == [4, 4, 8]
    gradients = np.flatnonzero((operations.role == Role.GRADIENT) & (trace.size == 4 * 64 * 256))
    module = module_of_requests(operations)[gradients]
    assert Counter(names[row].rpartition(".")[2] for row in module.tolist() if row >= 0) == {"up": 12, "down": 12}


def test_the_graph_of_a_step_orders_what_makes_before_what_uses(trace: Trace, operations: Operations) -> None:
    step = find_steady_step(trace, operations)
    assert step is not None
    graph = operation_graph(trace, operations, step.operations)
    assert list(graph) == step.operations.tolist()
    assert nx.is_directed_acyclic_graph(graph)
    assert all(first < second for first, second in graph.edges)
    values = [told for _, _, told in graph.edges(data=True) if told["kind"] == "value"]
    assert values
    assert all(told["bytes"] == bytes_of(trace, np.array(told["requests"])) for told in values)
    assert any(told["kind"] == "order" for _, _, told in graph.edges(data=True))
    crossing = crossing_bytes(trace, graph)
    assert len(crossing) == len(graph)
    assert crossing[-1] == 0
    assert crossing.max() > 1 << 20


def test_a_forward_pass_is_cut_between_its_layers(trace: Trace, operations: Operations) -> None:
    forward = outermost(operations) & (operations.begin >= trace.mark_event[2]) & (operations.end < trace.mark_event[3])
    (layers,) = repeated_blocks(operations)
    calls = [calls_of(operations, row) for row in layers.rows.tolist()[:2]]
    windows = [(operations.begin[ranges[-1]], operations.end[ranges[-1]]) for ranges in calls]
    rows = np.flatnonzero(forward & (operations.begin >= windows[0][0]) & (operations.end <= windows[1][1]))
    graph = operation_graph(trace, operations, rows)
    cuts = cut_operations(graph)
    last_of_first = max(row for row in rows.tolist() if operations.end[row] <= windows[0][1])
    assert last_of_first in cuts
    for cut in cuts:
        before, after = {row for row in graph if row < cut}, {row for row in graph if row > cut}
        assert not any(first in before and second in after for first, second in graph.edges)


def test_work_is_counted_as_the_formulas_say(operations: Operations) -> None:
    found = {}
    for number, (name, _, arguments) in enumerate(operations.shapes):
        sizes = [given["tensor"][1] for given in arguments if isinstance(given, dict) and "tensor" in given]
        found[name, str(sizes)] = number
    number = found["aten::addmm", str([[256], [128, 64], [64, 256]])]
    assert operations.shape_flops[number] == 2 * 128 * 64 * 256
    assert operations.shape_read_bytes[number] == 4 * (256 + 128 * 64 + 64 * 256)
    assert operations.shape_written_bytes[number] == 4 * 128 * 256
    changed = operations.access_kind == ACCESS_WRITTEN
    assert "aten::_foreach_addcdiv_" in {operations.name_of(row) for row in operations.access_op[changed]}


def test_verbs_show_roles_modules_and_blocks(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.trace.npz"
    save_traces(path, [trace])
    assert main(["stats", str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 blocks of class Layer" in out
    assert "saved activation" in out
    assert main(["top", str(path), "--json", "-"]) == 0
    (top,) = json.loads(capsys.readouterr().out)["devices"]
    for names in ("by_role", "by_module"):
        assert sum(entry["held_bytes"] for entry in top[names]) == top["allocated_bytes"]
    assert "layers.*.up" in {entry["name"] for entry in top["by_module"]}
    assert main(["top", "--tree", str(path), "--json", "-"]) == 0
    (branched,) = json.loads(capsys.readouterr().out)["devices"]
    of_modules = {(one["name"], one["held_bytes"]) for one in branched["tree"]["children"]}
    assert of_modules == {(entry["name"], entry["held_bytes"]) for entry in top["by_module"]}
    roles = {leaf["name"] for one in branched["tree"]["children"] for leaf in one["children"]}
    assert roles == {entry["name"] for entry in top["by_role"]}
    assert main(["explain", str(path), "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert sum(device["roles"].values()) == device["allocated_bytes"]
    page = tmp_path / "step.html"
    assert main(["report", str(path), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "saved activation of layers.*.up" in text
    (headers,) = re.findall(r'<script type="application/json" id="headers">(.*?)</script>', text)
    (shown,), count = json.loads(headers), trace.num_requests
    columns = columns_of(text, 0)[: 8 * count].reshape(8, count)
    live = (columns[0] <= top["event"] + 1) & (top["event"] + 1 < columns[0] + columns[1])
    for number, (group, listed) in enumerate((("module", "by_module"), ("role", "by_role")), start=6):
        held = 512 * np.bincount(columns[number][live], columns[2][live]).astype(int)
        named = {shown["groups"][group][row]: size for row, size in enumerate(held.tolist()) if size}
        assert named == {entry["name"]: entry["held_bytes"] for entry in top[listed]}


def test_a_step_is_put_on_the_clock_of_a_gpu(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "step.trace.npz", tmp_path / "step.html"
    save_traces(path, [trace])
    assert main(["timeline", str(path), "--gpu", "H100", "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    estimated = estimate_step(trace, rates_of("NVIDIA H100 80GB HBM3"))
    assert estimated is not None
    assert device["is_estimated"]
    assert device["seconds"] == pytest.approx(estimated.seconds, rel=1e-3)
    phases = {phase["name"]: phase for phase in device["phases"]}
    assert list(phases)[:3] == ["forward", "backward", "update"]
    computes = sum(phase["compute_seconds"] + phase["overlap_seconds"] for phase in phases.values())
    assert computes == pytest.approx(estimated.schedule.busy[Queue.COMPUTE], rel=1e-3)
    marks = trace.mark_event[:RECORDED_STEPS]
    live = trace.live_bytes(trace.aligned_size(512))[marks[-2] : marks[-1] + 1]
    assert max(phase["allocated_bytes"] for phase in phases.values()) == live.max()
    assert phases["update"]["headroom_bytes"] == device["total_bytes"] - phases["update"]["reserved_bytes"]
    ready, busy = device["as_ready"], estimated.schedule.busy
    assert max(busy.values()) <= ready["seconds"] * (1 + 1e-3), "no queue does two things at a time"
    assert ready["copy_seconds"] <= busy[Queue.TO_DEVICE] + busy[Queue.TO_HOST]
    assert main(["report", str(path), "--gpu", "H100", "-o", str(page)]) == 0
    assert "Times are estimated, for one step on" in page.read_text(encoding="utf-8")
    bare = tmp_path / "bare.trace.npz"
    save_traces(bare, [trace.replace(extra={})])
    assert main(["timeline", str(bare), "--gpu", "H100"]) == 2
    assert "record it with stalloc record --ops" in capsys.readouterr().err


def test_converting_keeps_the_tables(trace: Trace, operations: Operations, tmp_path: Path) -> None:
    first, second = tmp_path / "a.trace.npz", tmp_path / "b.trace.npz"
    save_traces(first, [trace])
    assert main(["convert", str(first), str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    (read,) = load_traces(second)
    again = read_operations(read)
    assert again is not None
    assert (again.names, again.shapes, again.modules) == (operations.names, operations.shapes, operations.modules)


def damaged(operations: Operations, column: str, seed: int) -> np.ndarray:
    """A column with one thing wrong with it."""
    good, random = operations.columns()[column], np.random.default_rng(seed)
    bad = good.copy()
    how = seed % 4
    if how == 0:
        return bad[:-1]
    if how == 1:
        return bad.astype(np.float64)
    if column.endswith("_text"):
        bad[random.integers(len(bad))] = ord("{")
        return bad
    bad[random.integers(len(bad))] = np.iinfo(bad.dtype).max if how == 2 else np.iinfo(bad.dtype).min
    return bad


def test_damaged_tables_are_refused_in_a_sentence(
    trace: Trace, operations: Operations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.trace.npz"
    for seed, column in enumerate(list(operations.columns()) * 4):
        save_traces(path, [trace.replace(extra=trace.extra | {column: damaged(operations, column, seed)})])
        assert main(["stats", str(path)]) in (0, 2)
        err = capsys.readouterr().err
        if err:
            assert "table of operations is damaged" in err, (column, err)
            assert err.count("\n") == 1, (column, err)
    extra = {name: values for name, values in trace.extra.items() if name != "op_parent"}
    save_traces(path, [trace.replace(extra=extra)])
    assert main(["stats", str(path)]) == 2
    assert "op_parent is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("op_parent", 0, "lies within what comes later"),
        ("op_begin", 1 << 40, "begin holds numbers beyond its table"),
        ("access_op", -1, "access_op holds numbers beyond its table"),
        ("made_by", 1 << 30, "made_by holds numbers beyond its table"),
        ("role", 99, "role holds numbers beyond its table"),
        ("module_is_block", 2, "module_is_block holds numbers beyond its table"),
        ("shape_flops", -1, "shape_flops holds numbers beyond its table"),
    ],
)
def test_what_points_outside_is_named(
    trace: Trace, operations: Operations, column: str, value: int, said: str, tmp_path: Path, capsys
) -> None:
    bad = operations.columns()[column].copy()
    bad[0] = value
    save_traces(tmp_path / "bad.trace.npz", [trace.replace(extra=trace.extra | {column: bad})])
    assert main(["top", str(tmp_path / "bad.trace.npz")]) == 2
    assert said in capsys.readouterr().err


def test_ranges_are_nested(operations: Operations) -> None:
    assert Counter(operations.kind.tolist())[RangeKind.OPTIMIZER] == RECORDED_STEPS
    held = np.flatnonzero(operations.parent >= 0)
    assert np.all(operations.begin[operations.parent[held]] <= operations.begin[held])


@pytest.mark.slow
def test_what_a_dispatch_mode_calls_is_in_the_ranges_that_the_program_opened(trace: Trace, tmp_path: Path) -> None:
    """An optimizer's step begins within the mode's call that opens it, and outlasts that."""
    under_a_mode = tmp_path / "under_a_mode.py"
    under_a_mode.write_text(
        "import runpy\nfrom torch.utils.flop_counter import FlopCounterMode\n"
        f"with FlopCounterMode(display=False):\n    runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    found = {}
    for how, one in (("ops", trace), ("mode", run_recorded(tmp_path / "mode.trace.npz", "--ops", under_a_mode))):
        operations = read_operations(one)
        assert operations is not None
        in_steps = within(operations, RangeKind.OPTIMIZER) & (operations.kind == RangeKind.OPERATION)
        found[how] = Counter(operations.name_of(row) for row in np.flatnonzero(in_steps))
    assert found["mode"] == found["ops"]
    assert found["ops"].total() > 0


def test_a_step_is_estimated_and_measured_times_come_first(
    trace: Trace, operations: Operations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = rates_of("NVIDIA H100 80GB HBM3")
    made = estimate_step(trace, rates)
    assert made is not None
    assert made.seconds >= max(made.schedule.busy.values())
    assert (made.error, made.measured) == (0.25, 0.0)
    assert made.schedule.busy[Queue.TO_DEVICE] > 0
    shapes = np.full(len(operations.shapes), 5_000_000)
    measured = trace.replace(extra=trace.extra | {"shape_ns": shapes})
    again = estimate_step(measured, rates)
    assert again is not None
    assert again.seconds == pytest.approx(5e-3 * len(again.operations), rel=0.02)
    assert again.error < 0.01
    save_traces(tmp_path / "step.trace.npz", [measured])
    assert main(["stats", "--gpu", "H100", str(tmp_path / "step.trace.npz")]) == 0
    assert "est. step" in capsys.readouterr().out
    if detect() == "virtual":
        assert main(["bench", "ops", "--for", str(tmp_path / "step.trace.npz")]) == 2
        assert "needs a GPU" in capsys.readouterr().err


def recorded(folder: Path, source: str, *options: str) -> tuple[int, Trace]:
    """The exit code and the trace of a program."""
    program, output = folder / "program.py", str(folder / "program.trace.npz")
    program.write_text(source, encoding="utf-8")
    command = ["record", "--ops", "--device", "virtual", *options, "-o", output, str(program)]
    done = run_stalloc(*command)
    return done.returncode, load_traces(output)[0]


def test_parameters_that_the_first_forward_pass_makes_are_parameters(tmp_path: Path, cuda_torch: None) -> None:
    source = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.LazyLinear(512), torch.nn.ReLU()).cuda()\n"
        "model(torch.ones(8, 256, device='cuda'))\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    model(torch.ones(8, 256, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    code, trace = recorded(tmp_path, source)
    assert code == 0
    operations = read_operations(trace)
    assert operations is not None
    assert bytes_of(trace, np.flatnonzero(operations.role == Role.PARAMETER)) == 4 * (512 * 256 + 512)


def test_a_program_that_runs_out_of_memory_is_recorded_until_then(tmp_path: Path, cuda_torch: None) -> None:
    source = (
        "import torch\nlayer, kept = torch.nn.Linear(256, 256).cuda(), []\n"
        "x = torch.randn(1 << 16, 256).cuda()\nwhile True:\n    kept.append(layer(x))\n"
    )
    code, trace = recorded(tmp_path, source, "--memory", "1GiB")
    assert code == 1
    operations = read_operations(trace)
    assert operations is not None
    kept = np.flatnonzero((trace.size == 1 << 26) & (operations.role != Role.INPUT))
    assert len(kept) > 3
    assert {operations.name_of(row) for row in operations.made_by[kept]} == {"aten::addmm"}


def test_what_is_not_seen_is_said(tmp_path: Path, cuda_torch: None) -> None:
    source = (
        "import threading, torch\nlayer = torch.nn.Linear(256, 256).cuda()\n"
        "work = lambda: layer(torch.randn(64, 256, device='cuda')).sum().backward()\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\nwork()\n"
    )
    code, trace = recorded(tmp_path, source)
    assert code == 0
    assert "have no operation: threads of the program's own made them" in " ".join(trace.info["notes"])
    operations = read_operations(trace)
    assert operations is not None
    assert np.count_nonzero(operations.made_by >= 0) > 5
    source = (
        "import torch\nfrom torch.profiler import ProfilerActivity, profile\n"
        "with profile(activities=[ProfilerActivity.CPU]):\n    x = torch.randn(64, 256, device='cuda') * 2\n"
    )
    code, trace = recorded(tmp_path, source)
    assert code == 0
    assert read_operations(trace) is None
    assert "the program used torch.profiler itself" in " ".join(trace.info["notes"])
