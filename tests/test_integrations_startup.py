"""`STALLOC=1 python …` through the installed hook: off by default, harmless, late, with last time's plan."""

import json
import os
import site
import subprocess
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_warm, without_compiling

import stalloc
from stalloc.allocator_conf import VARIABLES, conf_in_force
from stalloc.integrations import build_backend, hook, torch_conf
from stalloc.integrations.startup import chosen_device

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "tests" / "programs" / "cupy_loop.py"
HEAVY = ("numba", "numpy", "torch", "cupy", "networkx")
HOOKED = "from stalloc.integrations.startup import arm; arm()\n"  #: what the hook does at the start of a Python
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a Python that has the hook in place; variables of stalloc are those given and no others."""
    folder = tmp_path_factory.mktemp("hooked")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    lines = "".join(f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages())
    (packages / "environment.pth").write_text(lines)
    hook.place(packages)

    def run(*arguments: Any, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STALLOC")}
        command = [str(folder / "bin" / "python"), *(str(argument) for argument in arguments)]
        environment = {**clean, "STALLOC_CACHE": "off", **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        done.stderr = without_compiling(done.stderr)
        return done

    return run


def served(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that the hook has prepared, on the virtual GPU, without the start of a Python."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STALLOC")}
    ours = {"STALLOC": "1", "STALLOC_DEVICE": "virtual", "STALLOC_CACHE": "off"}
    done = run_warm(f"{HOOKED}{source}", variables={**clean, **ours, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def loaded(python: Run, source: str, **variables: str) -> set[str]:
    """Which of the heavy packages and stalloc a program has loaded at its end."""
    show = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(python("-c", source + show, **variables).stdout.split()) & {*HEAVY, "stalloc"}


def test_without_the_variable_nothing_is_loaded(python: Run) -> None:
    assert loaded(python, "") == set()
    assert loaded(python, "", STALLOC="0") == set()
    assert loaded(python, "", STALLOC="") == set()


def test_a_start_under_stalloc_loads_next_to_nothing(python: Run) -> None:
    """What typing, dataclasses, json and importlib.abc take is most of what every Python would start later by."""
    source = "before = set(sys.modules)\nfrom stalloc.integrations.startup import arm\narm()\n"
    show = "print(*sorted(set(sys.modules) - before))"
    bare = "import sys\nsys.path[:0] = sys.argv[1:]\n"
    place = Path(stalloc.__file__).parents[1]
    done = python("-I", "-S", "-c", f"{bare}import os\nos.environ['STALLOC'] = '1'\n{source}{show}", place)
    heavy = {"typing", "dataclasses", "inspect", "json", "pathlib", "tempfile", "importlib.abc", "re", "numpy"}
    assert heavy.isdisjoint(done.stdout.split())
    assert "stalloc.integrations.startup" in done.stdout


def test_a_program_without_cuda_is_left_alone(python: Run) -> None:
    done = python("-c", "print(1)", STALLOC="1")
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert loaded(python, "", STALLOC="1") == {"stalloc"}
    assert loaded(python, "import numpy", STALLOC="1") == {"stalloc", "numpy"}


@pytest.mark.usefixtures("cuda_torch")
def test_torch_on_the_cpu_is_left_alone(python: Run) -> None:
    source = "import torch; torch.ones(10).sum()"
    assert "numba" not in loaded(python, source, STALLOC="1", STALLOC_DEVICE="virtual")


def test_what_cannot_be_understood_is_one_sentence_and_the_program_runs(python: Run) -> None:
    for variables in ({"STALLOC": "maybe"}, {"STALLOC": "1", "STALLOC_DEVICE": "virtual:Voodoo2"}):
        done = python("-c", "print(1)", **variables)
        assert done.stdout == "1\n"
        assert done.stderr.startswith("stalloc: ")
        assert len(done.stderr.splitlines()) == 1
    with pytest.raises(ValueError, match="set it to auto"):
        chosen_device("tpu")
    assert chosen_device("auto") == ("auto", None)
    _, several = chosen_device("virtual:3xA100-80GB")
    assert several is not None
    assert (several.num_devices, several.name) == (3, "NVIDIA A100-SXM4-80GB")
    kind, gpu = chosen_device("virtual:24GiB")
    assert gpu is not None
    assert (kind, gpu.total_bytes) == ("virtual", 24 << 30)


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_the_second_run_starts_planned_and_a_damaged_plan_is_ignored(python: Run, tmp_path: Path) -> None:
    cache, report = tmp_path / "cache", tmp_path / "report-{rank}.json"
    variables = {
        "STALLOC": "1",
        "STALLOC_DEVICE": "virtual",
        "STALLOC_CACHE": str(cache),
        "STALLOC_REPORT": str(report),
    }

    def run(*arguments: Any) -> tuple[dict[str, Any], str]:
        done = python(LOOP, *arguments, **variables)
        assert done.stdout == "the program prints\n"
        return json.loads((tmp_path / "report-0.json").read_text()), done.stderr

    first, said = run(60)
    assert (first["plan_source"], said) == (None, "")
    assert first["devices"][0]["phase"] == "running on the plan"
    [kept] = cache.glob("*.plan.npz")
    second, said = run(60)
    assert (second["plan_source"], said) == ("cache", "")
    assert second["devices"][0]["hit_rate"] == 1.0
    assert second["devices"][0]["misses"] == 0
    assert second["devices"][0]["observed_reserved_peak_bytes"] is None
    other, _ = run(61)
    assert other["plan_source"] is None, "other arguments are another program"
    kept.write_bytes(kept.read_bytes()[:1000])
    damaged, said = run(60)
    assert damaged["plan_source"] is None
    assert len(said.splitlines()) == 1
    assert "is ignored" in said
    again, said = run(60)
    assert (again["plan_source"], said) == ("cache", "")


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_a_plan_that_went_stale_is_noticed_and_replaced(python: Run, tmp_path: Path) -> None:
    """The script is the same, what it does is not."""
    program = tmp_path / "program.py"
    (tmp_path / "sizes.txt").write_text("20000")
    program.write_text(
        """
import pathlib
import cupy as cp
size = int((pathlib.Path(__file__).parent / "sizes.txt").read_text())
for step in range(300):
    arrays = []
    for i in range(20):
        arrays.append(cp.ones(size + 640 * i) * 2)
        if i % 3 == 0:
            arrays.clear()
"""
    )
    variables = {
        "STALLOC": "1",
        "STALLOC_DEVICE": "virtual",
        "STALLOC_CACHE": str(tmp_path / "cache"),
        "STALLOC_REPORT": str(tmp_path / "report.json"),
    }

    def run() -> dict[str, Any]:
        assert python(program, **variables).stderr == ""
        return json.loads((tmp_path / "report.json").read_text())

    assert run()["plan_source"] is None
    assert run()["plan_source"] == "cache"
    (tmp_path / "sizes.txt").write_text("31000")
    stale = run()
    assert stale["plan_source"] == "cache"
    assert stale["devices"][0]["out_of_memory_errors"] == 0
    assert list((tmp_path / "cache").iterdir()) == []
    assert run()["plan_source"] is None
    fresh = run()
    assert fresh["plan_source"] == "cache"
    assert fresh["devices"][0]["hit_rate"] == 1.0


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_torch_is_served_from_its_first_use_of_cuda_and_settings_are_reported() -> None:
    source = """
import os, torch, stalloc.integrations.installing as installing
before = installing.current()
torch.cuda.is_available(), torch.cuda.device_count()
assert installing.current() is before is None
x = torch.empty(1 << 20, device="cuda")
state = installing.current().controllers[0].state
print(state.record.total.num_live, torch.cuda.memory_allocated(), os.environ["PYTORCH_CUDA_ALLOC_CONF"])
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("limited")
"""
    settings = "expandable_segments:True,per_process_memory_fraction:0.01,pinned_use_background_threads:True"
    done = served(source, STALLOC_DEVICE="virtual:24GiB", PYTORCH_CUDA_ALLOC_CONF=settings)
    assert done.stdout.splitlines() == [f"1 {4 << 20} {settings}", "limited"]
    [sentence] = done.stderr.splitlines()
    assert "pinned_use_background_threads, per_process_memory_fraction in force" in sentence
    assert "expandable_segments without effect" in sentence


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_a_program_that_chose_its_own_allocator_keeps_it(python: Run) -> None:
    source = """
import torch
print(torch.cuda.memory.get_allocator_backend())
x = torch.empty(1000, device="cuda")
import stalloc.integrations.installing as installing
print(installing.current().controllers[0].state.record.total.num_live, torch.cuda.memory.get_allocator_backend())
"""
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = python("-c", source, STALLOC="1", STALLOC_DEVICE="virtual", **conf)
    assert done.stdout.splitlines() == ["cudaMallocAsync", "0 cudaMallocAsync"]


def test_settings_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert conf_in_force() == ("", {})
    assert torch_conf.report(None) == ""
    text = "roundup_power2_divisions:[256:1,512:2,>:4], max_split_size_mb:128"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    variable, found = conf_in_force()
    assert variable == "PYTORCH_CUDA_ALLOC_CONF"
    assert found == {"roundup_power2_divisions": "[256:1,512:2,>:4]", "max_split_size_mb": "128"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.5")
    assert conf_in_force()[0] == "PYTORCH_ALLOC_CONF", "torch prefers the new name"


def test_wheels_carry_the_hook_and_own_it(tmp_path: Path) -> None:
    wheel = tmp_path / "made-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made/__init__.py", "")
        archive.writestr("made-1.dist-info/RECORD", "made/__init__.py,,\nmade-1.dist-info/RECORD,,\n")
    build_backend.add_files(wheel, {hook.FILE_NAME: hook.LINE.encode()})
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert archive.read(hook.FILE_NAME).decode() == hook.LINE
        assert len(archive.namelist()) == len(set(archive.namelist())) == 3
        record = archive.read("made-1.dist-info/RECORD").decode().splitlines()
    assert record[0].startswith(f"{hook.FILE_NAME},sha256=")
    assert len(record) == 3


def test_a_wheel_without_what_compiling_needs_stays_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "made-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("stalloc/__init__.py", "raise ImportError('no verbs here')")
    before = wheel.read_bytes()
    assert build_backend.add_compiled_code(wheel) == wheel
    assert wheel.read_bytes() == before
    assert "stalloc: the wheel comes without compiled code: " in capfd.readouterr().err


def test_the_hook_can_be_placed_and_removed_by_hand(tmp_path: Path) -> None:
    assert hook.place(tmp_path).read_text() == hook.LINE
    assert not hook.remove(tmp_path).exists()
    hook.remove(tmp_path)
    with pytest.raises(RuntimeError, match="cannot write"):
        hook.place(tmp_path / "missing")


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
@pytest.mark.parametrize("order", ["torch, cupy", "cupy, torch"])
def test_both_libraries_are_served_whichever_comes_first(order: str) -> None:
    source = f"""
import {order}
import stalloc.integrations.installing as installing
x = {"torch.ones(1000, device='cuda')" if order.startswith("cupy") else "cupy.ones(1000)"}
y = {"cupy.ones(1000)" if order.startswith("cupy") else "torch.ones(1000, device='cuda')"}
print(installing.current().controllers[0].state.record.total.num_live, torch.cuda.memory_allocated())
"""
    done = served(source)
    assert done.stdout == f"2 {4096 + 8192}\n"
    assert done.stderr == ""


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_a_history_asked_for_first_of_all_is_stallocs() -> None:
    source = """
import torch
torch.cuda.memory._record_memory_history()
x = torch.ones(1000, device="cuda")
print(torch.cuda.memory.get_allocator_backend(), len(torch.cuda.memory._snapshot()["device_traces"][0]) > 0)
"""
    done = served(source)
    assert done.stdout == "pluggable True\n", done.stderr


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_workers_by_fork_and_by_spawn(python: Run, tmp_path: Path) -> None:
    """Data loaders fork; a spawned process is a program of its own, with stalloc of its own."""
    program = tmp_path / "workers.py"
    program.write_text(
        """
import multiprocessing, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.full((3,), float(i))

def child(queue):
    import stalloc.integrations.installing as installing
    x = torch.ones(1 << 20, device="cuda")
    queue.put([installing.current().controllers[0].state.record.total.num_live, torch.cuda.memory_allocated()])

if __name__ == "__main__":
    x = torch.ones(1000, device="cuda")
    total = 0.0
    for epoch in range(2):
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
            total += batch.sum().item()
            batch.cuda()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(total, queue.get(timeout=120), torch.cuda.memory_allocated())
    process.join(60)
    sys.exit(process.exitcode)
"""
    )
    done = python(program, STALLOC="1", STALLOC_DEVICE="virtual", STALLOC_CACHE=str(tmp_path / "cache"))
    assert done.stdout == f"720.0 [1, {4 << 20}] 4096\n"
    assert done.stderr == ""


_TORCHRUN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
assert torch.cuda.device_count() == 2
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(14):
    model(torch.ones(64, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_ranks_of_torchrun_are_served_on_devices_of_their_own_and_plan_once(python: Run, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(_TORCHRUN)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    served = {"STALLOC": "1", "STALLOC_DEVICE": "virtual:2x24GiB", "STALLOC_REPORT": str(tmp_path / "rank{rank}.json")}
    python(*launch, **served, OMP_NUM_THREADS="1")
    reports = []
    for rank in range(2):
        devices = json.loads((tmp_path / f"rank{rank}.json").read_text())["devices"]
        assert [device["device"] for device in devices] == [rank]
        reports += devices
    assert [report["phase"] for report in reports] == ["running on the plan"] * 2
    assert [report["hit_rate"] for report in reports] == [1.0, 1.0]
    assert sorted("by another rank" in report["plan_method"] for report in reports) == [False, True]


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a Python that has the hook and, unless `there` is False, stalloc, but no other package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    hook.place(packages)

    def run(*arguments: str, there: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        (packages / "checkout.pth").write_text(f"{Path(stalloc.__file__).parents[1]}\n" if there else "")
        command = [str(folder / "bin" / "python"), "-B", *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

    return run


_LOADED = "import sys; print(sorted(name for name in sys.modules if name.startswith('stalloc')))"


@pytest.mark.parametrize("value", ["1", "yes", "virtual"])
@pytest.mark.parametrize("isolated", ["-I", "-E"])
def test_a_python_that_is_to_ignore_the_environment_is_left_alone(bare: Run, isolated: str, value: str) -> None:
    done = bare(isolated, "-c", _LOADED, STALLOC=value, STALLOC_DEVICE="virtual")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert "stalloc" in bare("-c", _LOADED, STALLOC=value).stdout, "else it is loaded"


def test_a_hook_whose_stalloc_is_gone_is_one_sentence(bare: Run) -> None:
    done = bare("-c", "print(1)", there=False, STALLOC="1")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == (
        "stalloc: it cannot be loaded (ModuleNotFoundError(\"No module named 'stalloc'\")): install it again, or unset "
        "STALLOC.\n"
    )
    quiet = bare("-c", "print(1)", there=False, STALLOC="0")
    assert (quiet.stdout, quiet.stderr) == ("1\n", "")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_sentence_that_cannot_be_said_stops_nothing(bare: Run, redirection: str, there: bool) -> None:
    interpreter = bare("-c", "import sys; print(sys.executable)").stdout.strip()
    bare("-c", "", there=there)
    command = ["sh", "-c", f"{interpreter} -B -c 'print(1)' {redirection}"]
    done = subprocess.run(command, env={"STALLOC": "yes"}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")


_ODD = (
    "",
    " ",
    "\n",
    "1\n2",
    "\udcff\udc80",
    "\x1b[31m",
    "\u202e",
    "²",
    "-1",
    "9" * 5000,
    "None",
    "{pid}" * 1000,
    "/" * 5000,
)
_ODD_DEVICES = (
    "virtual:99999999999999999999x1GiB",
    "virtual:0x1GiB",
    "virtual:-1x1GiB",
    "virtual:2x",
    "virtual:x1GiB",
    "virtual:65x1GiB",
    f"virtual:{'9' * 5000}x1GiB",
    f"virtual:{'9' * 400}GiB",
    f"virtual:{'9' * 5000}",
    "virtual:99999999999999999999GiB",
    "virtual:0GiB",
    "virtual:1.5.5GiB",
    "virtual:²GiB",
    "virtual:\n",
    "virtual:\udcff",
    "virtual:" + "x" * 50_000,
    "auto:A100-80GB",
)
_ODD_STREAMS = ("weigh:²", "weigh:" + "9" * 5000, "weigh:-1", "share:1", "weigh:99999999999999999999")


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("STALLOC", _ODD),
        ("STALLOC_DEVICE", (*_ODD, *_ODD_DEVICES)),
        ("STALLOC_STREAMS", (*_ODD, *_ODD_STREAMS)),
        ("STALLOC_ARENA", _ODD),
    ],
)
def test_whatever_a_variable_holds_the_program_runs(bare: Run, variable: str, values: tuple[str, ...]) -> None:
    """What cannot be meant is one line that names it; a value that only matters later is not looked at."""
    for value in values:
        done = bare("-c", "print(1)", **{"STALLOC": "1", variable: value})
        assert (done.returncode, done.stdout) == (0, "1\n"), value[:80]
        if (variable, value) == ("STALLOC", ""):
            assert done.stderr == ""
            continue
        [line] = done.stderr.splitlines()
        assert line.startswith("stalloc: "), value[:80]
        assert line.endswith(" The program goes on without stalloc.")
        assert "Error" not in line
        assert line.isprintable()
        assert len(line) < 400


@pytest.mark.usefixtures("cupy_installed")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"STALLOC_REPORT": "/dev/null/x"}, "cannot write /dev/null/x: Not a directory: name another file"),
        ({"STALLOC_REPORT": "\n" * 300}, "File name too long: name another file in STALLOC_REPORT."),
        (
            {"STALLOC_CACHE": "\udcff" * 300},
            "File name too long: name another folder in STALLOC_CACHE, or set it to off.",
        ),
        ({"STALLOC_DEVICE": "virtual:64x4EiB"}, "'4EiB' is not an amount of memory"),
        (
            {"STALLOC_DEVICE": "virtual:64x4194303TiB", "STALLOC_REPORT": "/dev/full"},
            "cannot write /dev/full: No space",
        ),
        ({"CC": "no-such-compiler", "XDG_CACHE_HOME": "{empty}"}, "CC=no-such-compiler is not there"),
    ],
)
def test_what_fails_later_costs_a_sentence_each_and_never_the_program(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import cupy\ntry:\n    cupy.ones(1)\nexcept Exception:\n    print('no GPU')\nprint('the end')")
    run = f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = served(run, **{name: value.format(empty=tmp_path) for name, value in variables.items()})
    assert done.stdout.endswith("the end\n")
    lines = done.stderr.splitlines()
    assert any(said in line for line in lines), done.stderr
    assert all(line.startswith("stalloc: ") and line.isprintable() for line in lines), done.stderr
    assert len(lines) <= 2
