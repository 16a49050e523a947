"""The device seam: choosing the device once, and what is said when it cannot be."""

import ctypes
import json

import pytest

from stalloc.cli import main
from stalloc.device import DEFAULT_GPU, KNOWN_GPUS, VirtualGPU, find_gpu, parse_memory
from stalloc.device.nvidia_driver import driver_version, gpus
from stalloc.device.virtual_build import package_directory
from stalloc.errors import BadInputError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 << 30), ("24 gib", 24 << 30), ("80GB", 80_000_000_000), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29),
        ("24g", 24 << 30), ("85899345920", 80 << 30), (4096, 4096), ("3kb", 3000), ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_memory_is_read_with_its_unit(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-1GiB", "0", "1e9", "0.1B", "24GiBs"])
def test_memory_that_makes_no_sense_is_refused(text):
    with pytest.raises(BadInputError, match="is not an amount of memory"):
        parse_memory(text)


@pytest.mark.parametrize(("name", "known"), [("h100", "H100"), ("A100 80gb", "A100-80GB"), ("rtx4090", "RTX-4090")])
def test_gpus_are_found_whatever_the_spelling(name, known):
    assert find_gpu(name) == KNOWN_GPUS[known]


def test_unknown_gpu_names_the_verb_that_lists_the_known_ones(capsys):
    with pytest.raises(BadInputError, match="no GPU called 'H900' is known: choose one that `stalloc info` lists"):
        find_gpu("H900")
    assert main(["info"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in KNOWN_GPUS)


def test_known_gpus_have_the_memory_that_their_name_says():
    for name, gpu in KNOWN_GPUS.items():
        assert gpu.num_devices == 1
        if name.endswith("GB"):
            promised_bytes = int(name.rpartition("-")[2].removesuffix("GB")) << 30
            assert 0.95 * promised_bytes < gpu.total_bytes <= promised_bytes


def test_slices_have_their_share_of_the_card():
    for name, gpu in KNOWN_GPUS.items():
        whole_name, slice_of, num_slices = name.partition("-MIG-")
        if slice_of:
            whole = KNOWN_GPUS[whole_name]
            share = int(num_slices.removesuffix("g")) / 7
            assert gpu.compute_capability == whole.compute_capability
            assert share * 0.8 * whole.num_multiprocessors < gpu.num_multiprocessors <= whole.num_multiprocessors
            assert share * 0.8 * whole.total_bytes < gpu.total_bytes < whole.total_bytes


@pytest.mark.parametrize(
    "wrong", [{"total_bytes": 0}, {"num_devices": 0}, {"num_devices": 65}, {"copy_limit_bytes": -1}]
)
def test_impossible_gpus_are_refused(wrong):
    with pytest.raises(BadInputError):
        VirtualGPU(**wrong)


def test_cuda_without_a_driver_names_the_way_out(run_fresh):
    if gpus():
        pytest.skip("this machine has a GPU")
    done = run_fresh("from stalloc.device import activate\nactivate('cuda')")
    assert "SetupError: no GPU with an NVIDIA driver was found: choose the virtual GPU" in done.stderr


def test_auto_means_what_is_there_and_imports_no_framework(run_fresh):
    program = """
import json, sys
from stalloc import device
print(json.dumps([device.active(), device.detect(), device.activate(), device.active(), device.activate("auto"),
                  [name for name in ("torch", "cupy") if name in sys.modules]]))
"""
    expected = "cuda" if gpus() else "virtual"
    assert json.loads(run_fresh(program).stdout) == [None, expected, expected, expected, expected, []]


def test_the_choice_is_kept_for_the_process(run_program):
    program = """
from stalloc.device import activate, find_gpu
activate("virtual", find_gpu("T4"))
activate("virtual", find_gpu("T4"))
activate("virtual")
print("same is fine")
activate("virtual", find_gpu("L4"))
"""
    done = run_program(program)
    assert "same is fine" in done.stdout
    assert "SetupError: the virtual GPU is Tesla T4 already: choose another one in a new process." in done.stderr


def test_too_late_an_activation_names_what_was_imported(run_program, cupy_installed):
    done = run_program("import cupy_backends\nfrom stalloc.device import activate\nactivate('virtual')")
    assert "SetupError: cupy_backends was imported before the virtual GPU" in done.stderr


def test_devices_before_a_choice_say_so(run_program):
    done = run_program("from stalloc.device import devices\ndevices()")
    assert "SetupError: no device is chosen yet" in done.stderr


def test_missing_cupy_names_the_extra_to_install(run_program):
    program = """
import sys
from stalloc.device import activate, devices
activate("virtual")
sys.modules["cupy"] = None
devices()
"""
    done = run_program(program)
    assert "SetupError: CuPy is not installed, and stalloc takes all GPU memory from CuPy's pool" in done.stderr


def test_driver_answers_agree():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert driver_version() is None
        assert gpus() == []
    else:
        assert all(gpu.total_bytes > 0 and gpu.name for gpu in gpus())


def test_default_gpu_is_a_known_one():
    assert DEFAULT_GPU in KNOWN_GPUS.values()


def test_packages_are_found_without_import():
    directory = package_directory("numpy")
    assert directory is not None
    assert (directory / "__init__.py").exists()
    assert package_directory("no_such_package_here") is None
