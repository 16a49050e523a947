"""`stalloc run` and `stalloc record` from the command line, on the virtual GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from properties import variants
from warm_programs import run_stalloc, without_compiling

pytestmark = pytest.mark.usefixtures("cupy_installed")

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_gpt.py"
LOOP = ROOT / "tests" / "programs" / "cupy_loop.py"
KEYS = {
    "steps",
    "requests_per_step",
    "hit_rate",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "plan_peak_bytes",
    "lower_bound_bytes",
    "observed_reserved_peak_bytes",
    "observed_allocated_peak_bytes",
    "run_allocated_peak_bytes",
    "run_reserved_peak_bytes",
    "end_reserved_bytes",
    "fragmentation",
    "devices",
    "exit_code",
}


def stalloc(
    folder: Path, verb: str, *arguments: Any, code: int = 0, cache: Path | str = "off"
) -> subprocess.CompletedProcess[str]:
    """Run a verb in a folder; its exit code has to be `code`. Plans are kept in `cache`."""
    device = ("--device", "virtual") if verb in ("run", "record") else ()
    words = verb, *device, *arguments
    done = run_stalloc(*words, folder=folder, variables={**os.environ, "STALLOC_CACHE": str(cache)})
    assert done.returncode == code, f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
    return done


def run(folder: Path, *arguments: Any, code: int = 0, cache: Path | str = "off") -> dict[str, Any]:
    """`stalloc run --json -`: the object."""
    return json.loads(stalloc(folder, "run", "--json", "-", *arguments, code=code, cache=cache).stdout)


def sentence(folder: Path, verb: str, *arguments: Any) -> str:
    """The one sentence of an error of stalloc's own, with exit code 125."""
    done = stalloc(folder, verb, *arguments, code=125)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("stalloc: ")
    return lines[0]


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize(
    "variant",
    [
        (),
        pytest.param(("--accumulate", "4"), marks=pytest.mark.slow),
        pytest.param(("--checkpoint",), marks=pytest.mark.slow),
        pytest.param(("--autocast",), marks=pytest.mark.slow),
    ],
)
def test_training_runs_on_the_plan(tmp_path: Path, variant: tuple[str, ...]) -> None:
    result = run(tmp_path, TRAIN, "--size", "tiny", "--steps", "10", *variant)
    assert result.keys() >= KEYS
    assert result["exit_code"] == 0
    assert result["steps"] == 10
    assert result["planned_steps"] >= 5
    assert result["phase"] == "running on the plan"
    assert result["hit_rate"] >= 0.999
    assert result["plan_peak_bytes"] == result["lower_bound_bytes"]
    assert result["allocated_peak_bytes"] <= result["reserved_peak_bytes"]
    assert 0 < result["observed_allocated_peak_bytes"] <= result["observed_reserved_peak_bytes"]
    assert result["requests_per_step"] > 100
    assert result["unknown_frees"] == result["out_of_memory_errors"] == result["conflicts"] == 0
    assert [device["device"] for device in result["devices"]] == [0]
    assert {key: result[key] for key in result["devices"][0]} == result["devices"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize("variant", [(), ("--checkpoint",), ("--accumulate", "4")])
def test_the_7b_step_reserves_no_more_than_it_allocates(tmp_path: Path, variant: tuple[str, ...]) -> None:
    result = run(tmp_path, TRAIN, "--size", "7b", "--steps", "7", *variant)
    assert result["hit_rate"] >= 0.999
    assert result["plan_peak_bytes"] == result["lower_bound_bytes"]
    assert result["reserved_peak_bytes"] <= 1.01 * result["allocated_peak_bytes"]
    assert result["requests_per_step"] > 3000


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
def test_a_saved_plan_holds_from_the_first_allocation_at_7b(tmp_path: Path) -> None:
    program = (TRAIN, "--size", "7b", "--steps", "5")
    first = run(tmp_path, "--save-plan", "step.plan.npz", *program)
    again = run(tmp_path, "--plan", "step.plan.npz", *program)
    assert first["observed_reserved_peak_bytes"] > 0
    assert again["hit_rate"] >= 0.999
    assert again["misses"] <= 0.001 * again["hits"]
    assert again["conflicts"] == 0
    assert again["observed_reserved_peak_bytes"] is None
    # over the whole run, weights and optimizer state included
    assert again["reserved_peak_bytes"] <= 1.01 * again["allocated_peak_bytes"]
    assert again["allocated_peak_bytes"] == max(first["allocated_peak_bytes"], first["observed_allocated_peak_bytes"])
    assert again["plan_peak_bytes"] <= 1.01 * again["lower_bound_bytes"]


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
def test_compare_native_puts_both_settings_of_the_caching_allocator_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    program = ("--compare-native", TRAIN, "--size", "tiny", "--steps", "8")
    done = stalloc(tmp_path, "run", "--json", "result.json", *program)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["native_exit_code"] == 0
    assert result["native_allocated_peak_bytes"] == result["observed_allocated_peak_bytes"]
    assert result["native_step_ms"] > 0
    assert result["step_ms"] > 0
    native, expandable = result["native"], result["native_expandable"]
    assert native["conf"] == "max_split_size_mb:128"
    assert native["dropped"] == "expandable_segments:True"
    assert expandable["conf"] == "max_split_size_mb:128,expandable_segments:True"
    assert expandable["dropped"] == ""
    for peer in (native, expandable):
        assert peer["reserved_peak_bytes"] >= peer["watched_reserved_peak_bytes"] >= peer["allocated_peak_bytes"]
        assert peer["reserved_peak_bytes"] >= peer["later_reserved_peak_bytes"] >= peer["end_reserved_bytes"] > 0
    assert "native: without your setting expandable_segments:True" in done.stdout
    (header,) = [line for line in done.stdout.splitlines() if line.split() == ["stalloc", "native", "expandable"]]
    labels = ("allocated peak", "reserved peak", "while watched", "on the plan", "reserved at the end")
    for label in labels:
        (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith(label + " ")]
        assert line.count("iB") == 3, line
        assert len(line) == len(header)


@variants("sizes", [[1, 2] * 12, [1] * 20 + [2] * 3], ids=["a cycle of two", "a plan at the end"])
def test_every_step_under_a_plan_counts_once(tmp_path: Path, sizes: list[int]) -> None:
    """Also where a pass over the plan is several steps, and where the last plan served none of them whole."""
    told = run(tmp_path, ROOT / "tests" / "programs" / "cupy_steps.py", *sizes)
    assert told["phase"] == "running on the plan"
    asked = told["run_hits"] + told["run_misses"]  # while a plan was in force
    assert told["hit_rate"] == told["run_hits"] / asked > 0.8
    assert told["requests_per_step"] == 25
    assert told["planned_steps"] == asked / 25


def test_the_report_tells_the_whole_run_and_what_becomes_of_a_plan(tmp_path: Path) -> None:
    result = run(tmp_path, LOOP, 50)
    peaks = result["reserved_peak_bytes"], result["observed_reserved_peak_bytes"]
    assert result["run_reserved_peak_bytes"] == max(peaks)
    assert result["fragmentation"] == pytest.approx(
        1 - result["run_allocated_peak_bytes"] / result["run_reserved_peak_bytes"], abs=1e-6
    )
    assert result["end_reserved_bytes"] <= result["run_reserved_peak_bytes"]


@pytest.mark.slow
def test_a_program_without_a_step_that_repeats_is_called_settled(tmp_path: Path) -> None:
    program = tmp_path / "random_steps.py"
    program.write_text(
        "import random, cupy, stalloc\n"
        "rng = random.Random(1)\n"
        "for step in range(220):\n"
        "    kept = [cupy.empty(rng.randrange(1 << 10, 1 << 20), cupy.uint8) for _ in range(rng.randrange(20, 40))]\n"
        "    del kept\n"
        "    stalloc.step()\n"
    )
    done = stalloc(tmp_path, "run", "--json", "result.json", program)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["phase"] == "served without a plan, settled"
    assert "served without a plan, settled" in done.stdout
    assert "observing" not in done.stdout


# --- record, plan, validate, run ---------------------------------------------------------------------------------


def test_record_plan_validate_run(tmp_path: Path) -> None:
    recorded = json.loads(stalloc(tmp_path, "record", "--json", "-", "-o", "loop.trace.npz", LOOP, "--mark").stdout)
    assert recorded["output"] == "loop.trace.npz"
    device = recorded["devices"][0]
    assert device["steps"] == 60
    assert device["requests"] > 60 * 20
    assert device["allocated_peak_bytes"] <= device["reserved_peak_bytes"]
    stalloc(tmp_path, "plan", "loop.trace.npz", "-o", "loop.plan.npz")
    stalloc(tmp_path, "validate", "loop.plan.npz", "loop.trace.npz")
    program = tmp_path / "removing.py"  # what it does to the file of its own plan does not matter any more
    program.write_text(
        f"import os, runpy\nos.remove('loop.plan.npz')\nrunpy.run_path({str(LOOP)!r}, run_name='__main__')\n"
    )
    result = run(tmp_path, "--plan", "loop.plan.npz", program)
    assert result["hit_rate"] == 1.0
    assert result["misses"] == result["conflicts"] == 0
    assert result["planned_steps"] > 30


def test_a_plan_of_another_program_does_no_harm_and_is_given_up(tmp_path: Path) -> None:
    stalloc(tmp_path, "run", "--save-plan", "one.plan.npz", LOOP)
    result = run(tmp_path, "--plan", "one.plan.npz", LOOP, 600, "--other")
    assert result["exit_code"] == 0
    assert result["unknown_frees"] == result["out_of_memory_errors"] == 0
    assert result["plans_made"] == 2 or result["note"], "it went on with a plan of its own, or says why not"
    if result["plans_made"] == 2:
        assert result["hit_rate"] > 0.99
    assert result["plan_misfit"], "it says that the plan which was given did not fit"


def test_plans_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    stalloc(tmp_path, "run", "--save-plan", "one.plan.npz", LOOP)
    stalloc(tmp_path, "record", "-o", "t.trace.npz", LOOP, 2)
    assert "gone.plan.npz" in sentence(tmp_path, "run", "--plan", "gone.plan.npz", LOOP)
    assert "t.trace.npz" in sentence(tmp_path, "run", "--plan", "t.trace.npz", LOOP)
    (tmp_path / "text.plan.npz").write_text("this is no plan")
    assert "text.plan.npz" in sentence(tmp_path, "run", "--plan", "text.plan.npz", LOOP)
    small = sentence(tmp_path, "run", "--memory", "1MiB", "--plan", "one.plan.npz", LOOP)
    assert "needs an arena" in small
    assert "--save-plan" in sentence(tmp_path, "run", "--plan", "one.plan.npz", "--save-plan", "x.plan.npz", LOOP)


# --- the program -------------------------------------------------------------------------------------------------


def test_json_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--json", "-", LOOP)
    json.loads(done.stdout)
    assert "the program prints" in done.stderr


def test_without_json_the_program_prints_as_ever_and_a_table_follows(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--json", "result.json", LOOP)
    assert done.stdout.startswith("the program prints\n")
    assert "device 0" in done.stdout
    assert "hit rate" in done.stdout
    assert "virtual NVIDIA H200" in done.stdout
    assert "kernels do nothing, so losses are 0" in done.stdout
    assert "next: stalloc run --save-plan" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["hit_rate"] == 1.0


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(LOOP, package / "__main__.py")
    (package / "helper.py").write_text("import sys\nimport my_package\nprint(__name__, sys.argv[1:])\nimport cupy\n")
    result = run(tmp_path, "-m", "my_package", 50)
    assert result["hit_rate"] == 1.0
    done = stalloc(tmp_path, "run", "-m", "my_package.helper", "--json", "x", "-h")
    assert "__main__ ['--json', 'x', '-h']" in done.stdout
    assert not (tmp_path / "x").exists()


def test_the_program_sees_its_own_name_arguments_and_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("value = 7\n")
    script = tmp_path / "sub" / "script.py"
    script.write_text(
        "import sys, beside\n"
        "print(__name__, sys.argv, beside.value, __file__, sys.modules['__main__'].__file__)\n"
        "import pickle\n"
        "class Mine: pass\n"
        "assert type(pickle.loads(pickle.dumps(Mine()))) is Mine\n"
    )
    done = stalloc(tmp_path, "run", "sub/script.py", "--plan", "a", "-m", "b")
    assert done.stdout.splitlines()[0] == (
        "__main__ ['sub/script.py', '--plan', 'a', '-m', 'b'] 7 sub/script.py sub/script.py"
    )
    assert "allocated no GPU memory" in done.stdout


def test_a_failing_program_gives_exit_code_1_its_traceback_and_the_report(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--json", "-", LOOP, "--fail", code=1)
    assert 'raise ValueError("the program fails")' in done.stderr
    assert done.stderr.strip().endswith("ValueError: the program fails")
    assert "runpy" not in done.stderr
    assert "stalloc/cli" not in done.stderr
    result = json.loads(done.stdout)
    assert result["exit_code"] == 1
    assert result["devices"][0]["allocated_peak_bytes"] > 0


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (2, 2)])
def test_the_exit_code_of_the_program(tmp_path: Path, code: int, expected: int) -> None:
    assert run(tmp_path, LOOP, 3, "--exit", code, code=expected)["exit_code"] == code


def test_a_failing_program_is_recorded_up_to_there(tmp_path: Path) -> None:
    stalloc(tmp_path, "record", "-o", "t.trace.npz", LOOP, "--fail", code=1)
    stats = json.loads(stalloc(tmp_path, "stats", "t.trace.npz", "--json", "-").stdout)
    assert stats["devices"][0]["requests"] > 30 * 20


def test_out_of_memory_in_a_program_says_what_it_needs(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--memory", "1MiB", LOOP, code=1)
    assert "stalloc: out of memory on device 0" in done.stderr
    assert "OutOfMemoryError" in done.stderr
    text = done.stderr[done.stderr.index("stalloc: out of memory") :]
    next_verb = "Next: `stalloc record -o run.trace.npz SCRIPT`"
    for part in ("MiB on the device", "too little, whatever the allocator does", next_verb):
        assert part in text
    assert "0.00 GiB" not in text
    lines = done.stdout.splitlines()
    (begin,) = [number for number, line in enumerate(lines) if line.startswith("device 0: virtual GPU of 1.00 MiB")]
    assert lines[begin + 1].strip().startswith("out of memory  1 time"), "the report says so first"
    assert lines[-1] == f"next: stalloc record -o run.trace.npz {LOOP}"


def test_usage_errors_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for verb, options in (("run", ()), ("record", ("-o", "t.trace.npz"))):
        assert "no program" in sentence(tmp_path, verb, *options)
        assert "there is no file missing.py" in sentence(tmp_path, verb, *options, "missing.py")
        assert "is a folder" in sentence(tmp_path, verb, *options, "folder")
        assert "no GPU called" in sentence(tmp_path, verb, *options, "--gpu", "Voodoo2", LOOP)
        assert "is not an amount of memory" in sentence(tmp_path, verb, *options, "--memory", "much", LOOP)
        assert "-m needs a module" in sentence(tmp_path, verb, *options, "-m")
        assert "--no-such-option" in stalloc(tmp_path, verb, *options, "--no-such-option", LOOP, code=125).stderr
    assert "does not end in .trace.npz" in sentence(tmp_path, "record", "-o", "t.npz", LOOP)
    assert "cannot write" in sentence(tmp_path, "record", "-o", "no/such/folder/t.trace.npz", LOOP)
    assert "--observe-steps is -1" in sentence(tmp_path, "run", "--observe-steps", "-1", LOOP)
    assert not (tmp_path / "t.trace.npz").exists()


def test_a_recording_without_gpu_memory_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print(1)\n")
    assert "allocated no GPU memory" in stalloc(tmp_path, "record", "-o", "t.trace.npz", "nothing.py", code=125).stderr
    assert not (tmp_path / "t.trace.npz").exists()


def test_where_a_plan_cannot_be_written_is_said_before_the_program_runs(tmp_path: Path) -> None:
    done = stalloc(tmp_path, "run", "--save-plan", "no/such/folder/p.plan.npz", LOOP, code=125)
    assert "cannot write" in done.stderr
    assert "the program prints" not in done.stdout


# --- the plan of the last run ------------------------------------------------------------------------------------


def test_the_second_run_starts_planned(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(tmp_path, LOOP, 50, cache=cache)
    assert first["plan_source"] is None
    assert first["observed_reserved_peak_bytes"] > 0
    second = run(tmp_path, LOOP, 50, cache=cache)
    assert second["plan_source"] == "cache"
    assert second["hit_rate"] == 1.0
    assert second["observed_reserved_peak_bytes"] is None
    assert run(tmp_path, "--memory", "24GiB", LOOP, 50, cache=cache)["plan_source"] is None, "another device"


@pytest.mark.slow
def test_a_kept_plan_that_the_device_has_no_room_for_is_left_aside(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(tmp_path, LOOP, 50, cache=cache)
    [plan] = cache.iterdir()
    run(tmp_path, "--memory", "1GiB", LOOP, 50, cache=cache)
    [small] = set(cache.iterdir()) - {plan}
    stalloc(tmp_path, "run", "--save-plan", "large.plan.npz", TRAIN, "--size", "124m", "--steps", "5")
    shutil.copy(tmp_path / "large.plan.npz", small)
    result = run(tmp_path, "--memory", "1GiB", LOOP, 50, cache=cache)
    assert result["exit_code"] == 0
    assert result["plan_source"] is None
    assert result["phase"] == "running on the plan"
    assert result["plans_made"] == 1
    again = run(tmp_path, "--memory", "1GiB", LOOP, 50, cache=cache)
    assert again["plan_source"] == "cache", "it was replaced"


def test_a_cache_that_cannot_be_written_costs_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = stalloc(tmp_path, "run", LOOP, 50, cache=tmp_path / "file" / "cache")
    [sentence] = done.stderr.splitlines()
    assert "could not be kept" in sentence


def test_the_report_says_where_the_plan_comes_from_and_goes_to(tmp_path: Path) -> None:
    first, second = (stalloc(tmp_path, "run", LOOP, 50, cache=tmp_path / "cache").stdout for _ in range(2))
    assert "next: run the same command again; it starts with this plan" in first
    assert "planned from the start, with the plan that the last run of this program left" in second


# --- signals, launchers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_leaves_the_report_and_the_recording(tmp_path: Path, name: str, code: int) -> None:
    program = tmp_path / "ended.py"
    program.write_text(
        "import os, signal, cupy\n"
        "kept = cupy.empty(1 << 20, cupy.uint8)\n"
        f"os.kill(os.getpid(), signal.{name})\n"
        "print('went on')\n"
    )
    ran = stalloc(tmp_path, "run", "--json", "report.json", program, code=code)
    assert "went on" not in ran.stdout
    assert ran.stderr.count("\n") == 1
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == code
    stalloc(tmp_path, "record", "-o", "t.trace.npz", program, code=code)
    stats = json.loads(stalloc(tmp_path, "stats", "t.trace.npz", "--json", "-").stdout)
    assert stats["devices"][0]["requests"] == 1


def test_a_program_that_handles_sigterm_itself_is_left_to_it(tmp_path: Path) -> None:
    program = tmp_path / "handles.py"
    program.write_text(
        "import os, signal, cupy\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('saved a checkpoint'))\n"
        "kept = cupy.empty(1 << 20, cupy.uint8)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('went on')\n"
    )
    assert "saved a checkpoint\nwent on\n" in stalloc(tmp_path, "run", program).stdout


def test_launchers_are_told_what_to_type(tmp_path: Path) -> None:
    for command in (
        ("torchrun", "--nproc-per-node", "2", "train.py"),
        ("accelerate", "launch", "train.py"),
        ("-m", "torch.distributed.run", "train.py"),
    ):
        said = sentence(tmp_path, "run", *command)
        typed = " ".join(command) if command[0] != "-m" else "python " + " ".join(command)
        assert f"type STALLOC=1 {typed}" in said
        assert f" {command[command[0] == '-m']} starts the program" in said
    assert "type stalloc run train.py" in sentence(tmp_path, "run", "python", "train.py")
    assert "type stalloc dryrun train.py" in stalloc(tmp_path, "dryrun", "python", "train.py", code=2).stderr


def test_a_dry_run_of_a_launcher_is_told_as_ranks(tmp_path: Path) -> None:
    for ranks, typed in (
        ("2", "torchrun --nproc-per-node 2 train.py --lr 1"),
        ("16", "-m torch.distributed.run --nnodes=2 --nproc_per_node=8 train.py --lr 1"),
        ("4", "accelerate launch --num_processes 4 --num_machines 2 train.py --lr 1"),
        ("8", "deepspeed --num_gpus=8 train.py --lr 1"),
        ("6", "mpirun -np 6 python train.py --lr 1"),
        ("N", "torchrun --nproc-per-node gpu train.py --lr 1"),
    ):
        assert (
            f"type stalloc dryrun --ranks {ranks} train.py --lr 1"
            in stalloc(tmp_path, "dryrun", *typed.split(), code=2).stderr
        )
    typed = "torchrun --nproc-per-node=2 -m pack.train --lr 1"
    said = stalloc(tmp_path, "dryrun", *typed.split(), code=2).stderr
    assert "type stalloc dryrun --ranks 2 -m pack.train --lr 1" in said
    assert "type STALLOC=1 srun ./train" in stalloc(tmp_path, "dryrun", "srun", "./train", code=2).stderr


@pytest.mark.slow
def test_without_cupy_one_sentence_names_the_extra(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class WithoutCupy:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return None if name[:4] == 'cupy' else PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [WithoutCupy if finder is PathFinder else finder for finder in sys.meta_path]\n"
        "from stalloc.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", source, "run", "--device", "virtual", str(LOOP)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 125
    said = without_compiling(done.stderr)
    assert said.startswith("stalloc: CuPy is not installed, and stalloc takes all GPU memory from CuPy's pool")
    assert "pip install 'stalloc[cuda13]'" in said
    assert said.count("\n") == 1


def test_a_process_that_stalloc_serves_is_not_recorded(tmp_path: Path, run_program: Any) -> None:
    source = f"""
import stalloc
from stalloc.cli import main
stalloc.install(device="virtual")
print(main(["record", "-o", {str(tmp_path / "a.trace.npz")!r}, {str(LOOP)!r}, "9"]))
"""
    done = run_program(source)
    assert done.stdout == "125\n"
    assert done.stderr.startswith(
        "stalloc: this process runs under stalloc already, without a recording: type stalloc record"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a.trace.npz").exists()
