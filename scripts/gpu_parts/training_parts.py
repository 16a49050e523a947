"""Programs that train: what they compute and need under stalloc, beside the native allocator."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from part import DEVICE, IS_REAL, ROOT, PartFailed, check, installed, note, run_program, step, use_device

TRAIN = str(ROOT / "examples" / "train_gpt.py")
#: where kernels do nothing a larger model shows nothing more
LARGER = ("--size", "124m", "--batch", "4", "--autocast") if IS_REAL else ("--size", "tiny", "--batch", "4")


def _folder() -> Path:
    return Path(os.environ["GPU_CHECK_FOLDER"])


def _losses_alike(*options: str) -> None:
    losses = {}
    for allocator in ("native", "stalloc"):
        file = _folder() / f"{allocator}.json"
        with step(allocator):
            run_program(allocator, TRAIN, *options, "--steps", "12", "--deterministic", "--losses", str(file))
        losses[allocator] = json.loads(file.read_text())
    pairs = zip(losses["native"], losses["stalloc"], strict=True)
    different = [number for number, (one, other) in enumerate(pairs) if one != other]
    note(first=float.fromhex(losses["native"][0]), last=float.fromhex(losses["native"][-1]))
    check(not different, f"the loss of step {different[0] if different else 0} is another one under stalloc")
    check(not IS_REAL or float.fromhex(losses["native"][-1]) > 0, "losses are zero: nothing was computed")


def losses_tiny() -> None:
    _losses_alike("--size", "tiny", "--checkpoint", "--accumulate", "2")


def losses_124m() -> None:
    _losses_alike(*LARGER)


def _train(torch: Any, technique: str, folder: Path) -> list[float]:
    import stalloc

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    saved: Any = None
    if technique in ("paging", "streaming"):
        stalloc.page_optimizer(optimizer)
    if technique == "streaming":
        stalloc.stream_layers(model, window=2)
    if technique == "offload":
        saved = stalloc.offload_activations(1.0)
    losses = []
    for number in range(5):
        data = torch.randn(256, 512, generator=torch.Generator().manual_seed(number)).cuda()
        if saved is not None:
            with saved:
                loss = model(data).square().mean()
        else:
            loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def techniques() -> None:
    """Activation offload, paged optimizers and streamed layers: losses are those without, bit by bit."""
    use_device()
    installed()
    import torch

    torch.use_deterministic_algorithms(True)
    with step("without"):
        wanted = _train(torch, "", _folder())
    for technique in ("offload", "paging", "streaming"):
        with step(technique):
            found = _train(torch, technique, _folder())
        check(found == wanted, f"losses with {technique} are {found}, without {wanted}")


def kernels() -> None:
    """The batched kernels against references, with rates."""
    rows = _folder() / "kernels.json"
    script = str(ROOT / "scripts" / "bench" / "kernels")
    done = subprocess.run([sys.executable, "-P", script, "--json", str(rows), "--quick"], check=False)
    if rows.exists():
        note(rows=json.loads(rows.read_text())["rows"])
    check(done.returncode == 0, f"scripts/bench/kernels ended with exit code {done.returncode}")


def _measured(printed: str) -> dict[str, float]:
    times = [float(text) for text in re.findall(r"^step .* ([\d.]+) ms$", printed, flags=re.MULTILINE)]
    peaks = re.search(r"^peak allocated ([\d.]+) GiB, reserved ([\d.]+) GiB$", printed, flags=re.MULTILINE)
    later = times[len(times) // 2 :]
    found = {"step_ms": statistics.median(later), "least_step_ms": min(later)} if later else {}
    return found | ({"allocated_gib": float(peaks[1]), "reserved_gib": float(peaks[2])} if peaks else {})


def timing(size: str, allocator: str) -> None:
    """Step time and reserved of a model under an allocator."""
    options = LARGER if size == "124m" else ("--size", size)
    with step(f"{size} under {allocator}"):
        printed, figures = run_program(allocator, TRAIN, *options, "--steps", "16")
    kept = ("hit_rate", "plans_made", "run_reserved_peak_bytes")
    note(**_measured(printed), **{name: figures[name] for name in kept if figures})


def trace() -> None:
    """A recording of the native allocator beside one of the virtual GPU: the same requests."""
    use_device()
    files = {}
    kind, _, gpu = DEVICE.partition(":")
    if IS_REAL:  # the same model of card: cuBLAS's workspace depends on it
        from stalloc.device import find_gpu
        from stalloc.device.nvidia_driver import gpus
        from stalloc.errors import BadInputError

        gpu = gpus()[0].name
        try:
            find_gpu(gpu)
        except BadInputError as error:
            note(told=str(error))
            gpu = ""
    for device in dict.fromkeys((kind, "virtual")):
        files[device] = _folder() / f"{device}.trace.npz"
        name = ["--gpu", gpu if IS_REAL else gpu.rpartition("x")[2]] if device == "virtual" and gpu else []
        command = ["record", "--stacks", "-o", str(files[device]), "--device", device, *name, TRAIN]
        with step(f"record on {device}"):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "stalloc", *command, *LARGER, "--steps", "3"], check=False
            )
        check(done.returncode == 0, f"stalloc record on {device} ended with exit code {done.returncode}")
    from stalloc import load_traces

    traces = {device: load_traces(file)[0] for device, file in files.items()}
    sizes = {device: one.size.tolist() for device, one in traces.items()}
    note(**{f"requests_{device}": len(one) for device, one in sizes.items()})
    first, last = sizes[kind], sizes["virtual"]
    pairs = enumerate(zip(first, last, strict=False))
    number = next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))
    check(first == last, f"request {number} is another one on the virtual GPU, of {len(first)} and {len(last)}")


def least_memory(allocator: str) -> None:
    """How far below what the native allocator reserves a program still runs."""
    printed, _ = run_program("native", TRAIN, *LARGER, "--steps", "6")
    reserved = _measured(printed)["reserved_gib"] * (1 << 30)
    total = float(_total_bytes())
    runs_with = None
    for share in (0.98, 0.94, 0.90):
        limit = f"per_process_memory_fraction:{share * reserved / total:.8f}"
        try:
            with step(f"with {share:.2f} of it"):
                run_program(allocator, TRAIN, *LARGER, "--steps", "6", PYTORCH_CUDA_ALLOC_CONF=limit)
        except PartFailed as error:
            note(told=str(error))
            break
        runs_with = share
    note(runs_with=runs_with)


def _total_bytes() -> int:
    code = "import part, sys; part.use_device(); import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def tests(name: str) -> None:
    file = f"tests/test_on_gpu.py::{name}"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", file],
        cwd=ROOT, check=False,
    )  # fmt: skip
    check(done.returncode == 0, f"{name} ended with exit code {done.returncode}")


PARTS = (
    losses_tiny, losses_124m, techniques, kernels, timing, trace, least_memory, tests,
)  # fmt: skip
