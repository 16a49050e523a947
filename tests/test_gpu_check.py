"""scripts/gpu_check on the virtual GPU: what the driver refuses is found and named first, and no result is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check"
ASKED = ["driver", "pages", "runtime"]


def checked(tmp_path: Path, *options: str, fault: str = "") -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the object that was written."""
    file = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--device", "virtual:2xH100", "--json", str(file), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"STALLOC_VIRTUAL_FAULTS": fault},
        timeout=700,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text())


def test_what_the_driver_says_is_kept_call_by_call(tmp_path):
    code, printed, found = checked(tmp_path, "--only", ",".join(ASKED))
    assert code == 0, printed
    assert list(found["parts"]) == ASKED
    timed = [note for note in found["parts"]["pages"]["notes"] if "median_us" in note]
    assert [note["size"].partition(" MiB")[0] for note in timed] == ["2", "16", "64"] * 4
    assert {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"} <= set(timed[0]["median_us"])


FAULTS = {
    "cuInit:3": ("driver", "cuInit says 3 (CUDA_ERROR_NOT_INITIALIZED)"),
    "cuMemSetAccess:801": ("pages", "cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB alone"),
    "cuMemCreate:2@7": ("pages", "cuMemCreate says 2 (CUDA_ERROR_OUT_OF_MEMORY): 16 MiB alone"),
    "cuMemCreate:999@40": ("pages", "cuMemCreate says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuMemAddressReserve:1": ("pages", "cuMemAddressReserve says 1 (CUDA_ERROR_INVALID_VALUE): 2 MiB alone"),
    "device1:busy": ("driver", "cuDevicePrimaryCtxRetain says 46 (CUDA_ERROR_DEVICE_UNAVAILABLE): device 1"),
    "peer1:refused": ("pages", "cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for peers"),
    "rdma:refused": ("pages", "cuMemCreate says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for network cards"),
    "export:refused": ("pages", "cuMemCreate says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for other processes"),
    "cudaDeviceSynchronize:700": ("runtime", "cudaDeviceSynchronize says 700 (cudaErrorIllegalAddress"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_first_and_the_other_parts_run(tmp_path, fault):
    part, sentence = FAULTS[fault]
    code, printed, found = checked(tmp_path, "--only", ",".join(ASKED), fault=fault)
    assert code == 1
    assert found["first_failure"].startswith(f"{part}: {sentence}")
    assert f"FIRST FAILURE  {found['first_failure']}" in printed
    assert list(found["parts"]) == ASKED


@pytest.mark.slow
def test_a_call_that_hangs_costs_its_part_and_names_itself(tmp_path):
    code, _, found = checked(tmp_path, "--only", "pages,runtime", fault="cuMemMap:hang@9")
    assert code == 1
    assert found["first_failure"] == "pages: did not end within 30 s in 'cuMemMap 16 MiB alone'"
    assert any("Fatal Python error: Aborted" in line for line in found["parts"]["pages"]["stderr"])
    assert any("median_us" in note for note in found["parts"]["pages"]["notes"])  # of 2 MiB, before it
    assert found["parts"]["runtime"]["passed"]


@pytest.mark.slow
def test_what_time_does_not_suffice_for_is_named(tmp_path):
    code, printed, found = checked(tmp_path, "--minutes", "0.3", "--only", "driver,patterns,spawn")
    assert code == 1
    assert next(iter(found["parts"])) == "driver"
    assert "spawn" in found["left_out"]
    assert "no time was left for" in printed


@pytest.mark.slow
def test_all_parts_pass_where_all_is_well(tmp_path):
    code, printed, found = checked(tmp_path)
    assert code == 0, printed
    assert len(found["parts"]) > 18
    assert found["left_out"] == []
