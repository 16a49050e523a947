"""scripts/gpu_check on the virtual GPU: what the driver refuses is found and named first, and no result is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from properties import variants

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
    assert [note["size"].partition(" MiB")[0] for note in timed] == [*["2", "16", "64"] * 4, "8192 times 2"]
    assert {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"} <= set(timed[0]["median_us"])


LOST = "700 (CUDA_ERROR_ILLEGAL_ADDRESS)"
#: what is told to fail: the part that names it, and how its sentence begins
FAULTS = {
    "cuInit:3": ("driver", "cuInit says 3 (CUDA_ERROR_NOT_INITIALIZED)"),
    "device1:busy": ("driver", "cuDevicePrimaryCtxRetain says 46 (CUDA_ERROR_DEVICE_UNAVAILABLE): device 1"),
    "device0:999": ("driver", "cuDevicePrimaryCtxRetain says 999 (CUDA_ERROR_UNKNOWN): device 0"),
    "attribute20:2": ("driver", "device 0 is in compute mode prohibited"),
    "attribute102:none": ("pages", "memory by pages is not offered by the driver"),
    "memory:none": ("pages", "cuMemGetInfo tells 0 of "),
    "memory:50": ("pages", "cuMemGetInfo tells 52428800 of "),
    "cudaMemGetInfo:2": ("pages", "cuMemGetInfo_v2 says 2 (CUDA_ERROR_OUT_OF_MEMORY)"),
    "range:2": ("pages", "cuMemAddressReserve says 2 (CUDA_ERROR_OUT_OF_MEMORY): "),
    "cuMemSetAccess:801": ("pages", "cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB alone"),
    "cuMemSetAccess:999@20": ("pages", "cuMemSetAccess says 999 (CUDA_ERROR_UNKNOWN): 2 MiB for network cards"),
    "cuMemCreate:2@7": ("pages", "cuMemCreate says 2 (CUDA_ERROR_OUT_OF_MEMORY): 16 MiB alone"),
    "cuMemCreate:999@40": ("pages", "cuMemCreate says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuMemMap:1": ("pages", "cuMemMap says 1 (CUDA_ERROR_INVALID_VALUE): 2 MiB alone"),
    "cuMemUnmap:1@3+": ("pages", "cuMemUnmap says 1 (CUDA_ERROR_INVALID_VALUE): 2 MiB alone"),
    "cuMemRelease:999": ("pages", "cuMemRelease says 999 (CUDA_ERROR_UNKNOWN): 2 MiB alone"),
    "cuMemAddressFree:1": ("pages", "cuMemAddressFree says 1 (CUDA_ERROR_INVALID_VALUE): "),
    "cuMemAddressReserve:1": ("pages", "cuMemAddressReserve says 1 (CUDA_ERROR_INVALID_VALUE): "),
    "peer1:refused": ("pages", "cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for peers"),
    "rdma:refused": ("pages", "cuMemCreate says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for network cards"),
    "export:refused": ("pages", "cuMemCreate says 801 (CUDA_ERROR_NOT_SUPPORTED): 2 MiB for other processes"),
    "cudaMemcpy:214@2": ("pages", "cuMemcpyDtoH_v2 says 214 (CUDA_ERROR_ECC_UNCORRECTABLE): 2 MiB alone"),
    "cudaGetDeviceCount:35": ("runtime", "cudaGetDeviceCount says 35 (cudaErrorInsufficientDriver"),
    "cudaMalloc:2": ("runtime", "cudaMalloc says 2 (cudaErrorMemoryAllocation"),
    "cudaHostAlloc:2": ("runtime", "cudaHostAlloc says 2 (cudaErrorMemoryAllocation"),
    "cudaStreamCreate:999": ("runtime", "cudaStreamCreateWithFlags says 999 (cudaErrorUnknown"),
    "cudaStreamSynchronize:719": ("runtime", "cudaStreamSynchronize says 719 (cudaErrorLaunchFailure"),
    "cudaMemcpyAsync:999": ("runtime", "cudaMemcpyAsync says 999 (cudaErrorUnknown"),
    "cudaEventCreate:999": ("runtime", "cudaEventCreate says 999 (cudaErrorUnknown"),
    "cudaEventRecord:999": ("runtime", "cudaEventRecord says 999 (cudaErrorUnknown"),
    "cudaEventSynchronize:999": ("runtime", "cudaEventSynchronize says 999 (cudaErrorUnknown"),
    "cudaEventQuery:999": ("runtime", "cudaEventQuery says 999 of an event that was waited for"),
    "cuEventQuery:999": ("runtime", "cuEventQuery says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuEventRecord:999": ("runtime", "cuEventRecord says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuStreamWaitEvent:999": ("runtime", "cuStreamWaitEvent says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuStreamIsCapturing:999": ("runtime", "cuStreamIsCapturing says 999 (CUDA_ERROR_UNKNOWN)"),
    "cuCtxSynchronize:700": ("runtime", f"cuCtxSynchronize says {LOST}"),
    "cudaDeviceSynchronize:700": ("runtime", "cudaDeviceSynchronize says 700 (cudaErrorIllegalAddress"),
    "cuModuleLoadData:209": ("runtime", "cuModuleLoadData says 209 (CUDA_ERROR_NO_BINARY_FOR_GPU"),
    "cuLaunchKernel:719": ("runtime", "cuLaunchKernel says 719 (CUDA_ERROR_LAUNCH_FAILED"),
    "cudaLaunchKernel:98": ("tensor", "torch.AcceleratorError: CUDA error: invalid device function, status 98 in "),
}


@variants("fault", ["cuMemMap:1", "device1:busy", "cuCtxSynchronize:700"])
def test_a_fault_is_named_first_and_the_other_parts_run(tmp_path, fault):
    part, sentence = FAULTS[fault]
    code, printed, found = checked(tmp_path, "--only", ",".join(ASKED), fault=fault)
    assert code == 1
    assert found["first_failure"].startswith(f"{part}: {sentence}")
    assert f"FIRST FAILURE  {found['first_failure']}" in printed
    assert list(found["parts"]) == ASKED


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_by_the_part_that_asks_for_it(tmp_path, fault):
    part, sentence = FAULTS[fault]
    code, _, found = checked(tmp_path, "--only", part, fault=fault)
    assert code == 1
    assert found["first_failure"].startswith(f"{part}: {sentence}")


#: what fails late: the part that meets it, and how its sentence begins
BLOCKS = "memory of device 0 comes in blocks from here on, without a plan: "
LATE = {
    "cuMemMap:999@200": ("pages", "cuMemMap says 999 (CUDA_ERROR_UNKNOWN): 8192 times 2 MiB"),
    "cuMemCreate:2@8000": ("pages", "cuMemCreate says 2 (CUDA_ERROR_OUT_OF_MEMORY): 8192 times 2 MiB"),
    "cuMemUnmap:999@5000+": ("pages", "cuMemUnmap says 999 (CUDA_ERROR_UNKNOWN): 8192 times 2 MiB"),
    "cudaHostAlloc:2@200": ("runtime", "cudaHostAlloc says 2 (cudaErrorMemoryAllocation"),
    "cuLaunchKernel:719@200": ("runtime", "cuLaunchKernel says 719 (CUDA_ERROR_LAUNCH_FAILED"),
    "cuMemMap:999@60": ("patterns", f"{BLOCKS}cuMemMap says 999"),
    "cuMemUnmap:1@2": ("patterns", f"{BLOCKS}cuMemUnmap says 1"),
    "cuMemSetAccess:999@60": ("adopt_and_compact", f"{BLOCKS}cuMemSetAccess says 999"),
    "cudaHostAlloc:2@5": ("streams_separate", "torch.AcceleratorError: CUDA error: out of memory, status 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", LATE)
def test_what_fails_while_stalloc_serves_fails_the_part_also_where_it_can_go_on(tmp_path, fault):
    part, sentence = LATE[fault]
    code, _, found = checked(tmp_path, "--only", part, fault=fault)
    assert code == 1
    assert found["first_failure"].startswith(f"{part}: {sentence}")


def test_devices_that_do_not_reach_each_other_are_noted(tmp_path):
    code, printed, found = checked(tmp_path, "--only", "pages", fault="peers:none")
    assert code == 0, printed
    assert {"told": "no other device reaches device 0"} in found["parts"]["pages"]["notes"]


SOME = "driver,tensor,patterns,streams_separate,graphs_torch,cupy_alone,fork,spawn,techniques"
#: what asks for pages
PAGED = (
    "pages,runtime,tensor,patterns,streams_share,small_card,graphs_cupy,adopt_and_compact,sleep_and_wake,losses_tiny"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "parts"),
    [("cudaDeviceSynchronize:700@9", SOME), ("cuMemSetAccess:801", PAGED)],
    ids=["a loss of the context", "no access to pages"],
)
def test_under_a_fault_each_part_has_its_turn_within_ten_minutes(tmp_path, fault, parts):
    code, printed, found = checked(tmp_path, "--minutes", "10", "--only", parts, fault=fault)
    assert code == 1
    assert found["seconds"] < 600
    assert found["left_out"] == []
    failed = {name: entry for name, entry in found["parts"].items() if not entry["passed"]}
    assert next(iter(failed)) in found["first_failure"]
    assert all("exit code" not in entry["failure"] for entry in failed.values()), printed


@pytest.mark.slow
def test_a_call_that_hangs_costs_its_part_and_names_itself_and_each_part_has_its_turn(tmp_path):
    parts = ["pages", "runtime", "tensor", "spawn"]  # spawn's processes hang as well
    code, printed, found = checked(tmp_path, "--minutes", "1.3", "--only", ",".join(parts), fault="cuMemMap:hang@9")
    assert code == 1
    assert found["seconds"] < 78
    assert found["left_out"] == []
    assert found["first_failure"] == "pages: did not end within 30 s in 'cuMemMap 16 MiB alone'"
    assert any("Fatal Python error: Aborted" in line for line in found["parts"]["pages"]["stderr"])
    assert any("median_us" in note for note in found["parts"]["pages"]["notes"])  # of 2 MiB, before it
    assert found["parts"]["runtime"]["passed"]
    failed = [entry["failure"] for entry in found["parts"].values() if not entry["passed"]]
    assert all("exit code" not in failure for failure in failed), printed


@pytest.mark.slow
def test_what_time_does_not_suffice_for_is_named(tmp_path):
    code, printed, found = checked(tmp_path, "--minutes", "0.19", "--only", "driver,patterns,spawn")
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
