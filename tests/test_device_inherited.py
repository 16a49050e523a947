"""New interpreters that a program on the virtual GPU starts: they have it too."""

import os
from pathlib import Path

import pytest
from warm_programs import run_stalloc

PROGRAM = """
import subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        import sitecustomize
        assert torch.ones(4, device="cuda").shape == (4,)
        return torch.full((3,), float(i * sitecustomize.OF_THE_USER))

if __name__ == "__main__":
    torch.ones(1, device="cuda")
    for how in ("spawn", "forkserver"):
        loader = DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=how, pin_memory=True)
        print(how, sum(batch.sum().item() for batch in loader))
    source = "import torch; print(torch.cuda.get_device_properties(0).total_memory >> 30)"
    print(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_processes_that_a_program_starts_have_its_virtual_gpu(tmp_path: Path) -> None:
    program, packages = tmp_path / "program.py", tmp_path / "packages"
    program.write_text(PROGRAM)
    packages.mkdir()
    (packages / "sitecustomize.py").write_text("OF_THE_USER = 7\n")
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    card = ("--device", "virtual", "--gpu", "H100", "--memory", "24GiB")
    done = run_stalloc("run", *card, program, variables=os.environ | {"PYTHONPATH": paths})
    assert done.stdout.splitlines()[:3] == ["spawn 588.0", "forkserver 588.0", "24"], done.stderr
