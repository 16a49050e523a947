"""What inference engines need of the virtual GPU: libraries for their own extensions, and NVML before they use it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stalloc.device.virtual_build import compiler

SCAN = """
import json
from stalloc.device.virtual_build import scan
found = scan()
print(json.dumps([[name for name in found.symbols if "Planted" in name], dict(found.libraries).get("libcublas.so.13")]))
"""
NVML = """
import ctypes, json, os, torch
nvml = ctypes.CDLL("libnvidia-ml.so.1")
num, major, minor, index = (ctypes.c_int() for _ in range(4))
handle, again, name, uuid = ctypes.c_void_p(), ctypes.c_void_p(), *(ctypes.create_string_buffer(96) for _ in range(2))
memory = (ctypes.c_ulonglong * 3)()
asked = [
    nvml.nvmlInit(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(num)),
    nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(handle)),
    nvml.nvmlDeviceGetName(handle, name, 96), nvml.nvmlDeviceGetUUID(handle, uuid, 96),
    nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(again)),
    nvml.nvmlDeviceGetIndex(again, ctypes.byref(index)),
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
    nvml.nvmlDeviceGetMemoryInfo(handle, memory),
]
unknown = nvml.nvmlDeviceGetHandleByUUID(b"GPU-of-another", ctypes.byref(again))
counted = torch.cuda.device_count()
child = os.fork()
if not child:
    os._exit(torch.cuda._is_in_bad_fork())
forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
total = torch.cuda.get_device_properties(1).total_memory
print(json.dumps([asked, unknown, num.value, counted, forked, name.value.decode(), index.value,
    [major.value, minor.value], memory[0] == total, memory[1] == torch.cuda.mem_get_info(1)[0]]))
"""


def plant(site: Path, name: str, source: str) -> None:
    """An installed extension that asks a library of NVIDIA's for what neither torch nor CuPy does."""
    command = compiler()
    assert command is not None
    shutil.rmtree(site, ignore_errors=True)
    (site / f"{name}-1.dist-info").mkdir(parents=True)
    (site / "blas.c").write_text("int nothing;")
    (site / "blas.map").write_text("libcublas.so.13 { };")
    needed = [f"-Wl,--version-script={site}/blas.map", "-Wl,-soname,libcublas.so.13", "-o", f"{site}/libcublas.so"]
    subprocess.run([*command, "-shared", "-fPIC", f"{site}/blas.c", *needed], check=True)
    (site / "own.c").write_text(source)
    own = ["-Wl,--no-as-needed", f"-L{site}", "-lcublas", "-o", f"{site}/{name}.so"]
    subprocess.run([*command, "-shared", "-fPIC", f"{site}/own.c", *own], check=True)
    (site / "libcublas.so").unlink()
    (site / f"{name}-1.dist-info" / "RECORD").write_text(f"{name}.so,sha256=x,1\n{name}-1.dist-info/RECORD,,\n")


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_what_an_installed_extension_asks_for_is_found_and_found_again_when_it_changes(run_fresh, tmp_path):
    site = tmp_path / "site"
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def found() -> tuple[list[str], list[str] | None]:
        done = run_fresh(SCAN, **variables)
        assert done.returncode == 0, done.stderr
        symbols, libraries = json.loads(done.stdout)
        return symbols, libraries

    own = "int cublasPlanted(void); int ofPlanted(void); int f(void) { return cublasPlanted() + ofPlanted(); }"
    plant(site, "engine", own)
    symbols, versions = found()
    assert symbols == ["cublasPlanted"], "what is not NVIDIA's by its name is left alone"
    assert versions is not None
    assert found()[0] == ["cublasPlanted"]
    plant(site, "engine", "int cudnnPlantedNext(void); int f(void) { return 7 * cudnnPlantedNext(); }")
    assert found()[0] == ["cudnnPlantedNext"]
    shutil.rmtree(site)
    assert found()[0] == []


@pytest.mark.usefixtures("cuda_torch")
def test_nvml_answers_what_engines_ask_and_leaves_them_free_to_fork(run_program):
    start = "from stalloc import device\ndevice.activate('virtual', device.VirtualGPU(num_devices=2, name='Card'))\n"
    done = run_program(start + NVML)
    assert done.returncode == 0, done.stderr
    asked, unknown, *rest = json.loads(done.stdout)
    assert asked == [0] * 9
    assert unknown != 0
    assert rest == [2, 2, 0, "Card", 1, [9, 0], True, True]
