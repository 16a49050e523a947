"""The examples do what they say, natively: on the CPU, and on the virtual GPU under the libraries' own pools."""

import importlib.util
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from warm_programs import run_stalloc, run_warm

EXAMPLES = Path(__file__).parents[1] / "examples"

# the program itself never hears of stalloc
ON_VIRTUAL_GPU = """
import runpy, sys
from stalloc import device
device.activate("virtual")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def why_no_virtual_gpu(*libraries: str) -> str | None:
    if shutil.which("cc") is None:
        return "the virtual GPU needs a C compiler"
    for name in libraries:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return f"{name} is not installed"
        if name == "torch" and not (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists():
            return "torch is not a CUDA build"
    return None


def needs(*libraries: str) -> pytest.MarkDecorator:
    reason = why_no_virtual_gpu(*libraries)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def run_example(name: str, *arguments: object) -> str:
    done = run_warm(ON_VIRTUAL_GPU, EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_on_cpu(tmp_path: Path, *arguments: object) -> list[float]:
    file = tmp_path / "losses.json"
    run_example("train_gpt.py", "--device", "cpu", "--size", "tiny", "--losses", file, *arguments)
    return [float.fromhex(loss) for loss in json.loads(file.read_text())]


@pytest.mark.slow
@needs("torch")
def test_training_on_the_cpu_learns_and_repeats_to_the_last_bit(tmp_path: Path) -> None:
    arguments = ("--steps", 40, "--batch", 8, "--lr", 3e-3, "--deterministic")
    first = losses_on_cpu(tmp_path, *arguments)
    assert len(first) == 40
    assert abs(first[0] - math.log(256)) < 0.5, "an untrained model is as good as guessing among 256 tokens"
    assert first[-1] < 0.8 * first[0]
    assert losses_on_cpu(tmp_path, *arguments) == first


@pytest.mark.slow
@needs("torch")
def test_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    plain = losses_on_cpu(tmp_path, "--steps", 4, "--deterministic")
    assert losses_on_cpu(tmp_path, "--steps", 4, "--deterministic", "--checkpoint") == plain


@needs("torch")
def test_accumulating_and_autocast_train_too(tmp_path: Path) -> None:
    losses = losses_on_cpu(tmp_path, "--steps", 3, "--accumulate", 2, "--autocast")
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


@needs("torch")
@pytest.mark.parametrize(
    "option",
    [
        "--checkpoint",
        pytest.param("--autocast", marks=pytest.mark.slow),
        pytest.param("--deterministic", marks=pytest.mark.slow),
    ],
)
def test_a_7b_step_runs_on_the_virtual_gpu(option: str) -> None:
    printed = run_example("train_gpt.py", "--size", "7b", "--steps", 2, option)
    assert len(re.findall(r"^step +\d+  loss ", printed, flags=re.MULTILINE)) == 2
    peak = re.search(r"^peak allocated ([\d.]+) GiB, reserved ([\d.]+) GiB$", printed, flags=re.MULTILINE)
    assert peak is not None, printed
    parameters_gradients_and_adam_gib = 6.7384e9 * 2 * 4 / 2**30
    assert parameters_gradients_and_adam_gib < float(peak[1]) <= float(peak[2]) < 141


@needs("cupy")
def test_cupy_filters_returns_all_that_it_took() -> None:
    printed = run_example("cupy_filters.py", "--steps", 3, "--size", 128, "--batch", 2)
    assert re.search(r"^[\d.]+ images a second", printed, flags=re.MULTILINE)
    pool = re.search(r"pool holds ([\d.]+) MiB, ([\d.]+) MiB in use", printed)
    assert pool is not None, printed
    assert float(pool[1]) > 0.1, "the pool keeps what the temporaries took"
    assert float(pool[2]) < 0.1, "only the running total is left"


@needs("torch", "cupy")
def test_cupy_and_torch_hand_arrays_to_each_other() -> None:
    printed = run_example("cupy_and_torch.py", "--steps", 3, "--size", 64, "--batch", 4)
    assert re.search(r"^step +2  loss ", printed, flags=re.MULTILINE)
    reserved = re.search(r"^torch reserved ([\d.]+) MiB", printed, flags=re.MULTILINE)
    pool = re.search(r"pool holds ([\d.]+) MiB", printed)
    assert reserved is not None, printed
    assert pool is not None, printed
    assert float(reserved[1]) > 0
    assert float(pool[1]) > 0


@pytest.mark.slow
@needs("torch", "cupy")
def test_layers_and_state_in_host_memory_are_recorded_with_their_copies(tmp_path: Path) -> None:
    trace = tmp_path / "offloaded.trace.npz"
    program = EXAMPLES / "offloaded.py"
    words = ("record", "--ops", "--device", "virtual", "--gpu", "RTX-4090", "-o", trace, program)
    done = run_stalloc(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (study,) = json.loads(run_stalloc("timeline", "--json", "-", trace, folder=tmp_path).stdout)["devices"]
    assert study["device_name"] == "NVIDIA GeForce RTX 4090"
    assert {part["phase"] for part in study["parts"]} == {"forward", "backward", "update"}
    assert study["phases"][0]["overlap_seconds"] > 10 * study["phases"][0]["copy_seconds"], (
        "layers come while others compute"
    )
    backward, update = study["phases"][1:]
    assert update["copy_seconds"] > 0.2 * study["seconds"] < backward["compute_seconds"]
    assert study["missed_across_seconds"] >= update["copy_seconds"], "backward computes meanwhile for longer"
    assert study["as_ready"]["seconds"] < 0.85 * study["seconds"], "most of it needs gradients of single layers alone"
    assert any("that the program holds in host memory would fit" in sentence for sentence in study["findings"])
