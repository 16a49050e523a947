"""`STALLOC=1 python …` through the installed hook: off by default, harmless, late, with last time's plan."""

import json
import os
import site
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import without_compiling

import stalloc
from stalloc.integrations import hook
from stalloc.integrations.startup import chosen_device

ROOT = Path(__file__).parents[1]
LOOP = ROOT / "tests" / "programs" / "cupy_loop.py"
HEAVY = ("numba", "numpy", "torch", "cupy", "networkx")
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


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_a_memory_pool_may_be_the_first_thing_that_a_program_makes(python: Run) -> None:
    source = """
from torch.cuda import MemPool, get_allocator_backend, use_mem_pool
pool = MemPool()
import torch
with use_mem_pool(pool):
    print(torch.ones(10, device="cuda").numel(), get_allocator_backend(), pool.use_count())
"""
    done = python("-c", source, STALLOC="1", STALLOC_DEVICE="virtual")
    assert done.stdout == "10 pluggable 2\n"


@pytest.mark.slow
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
