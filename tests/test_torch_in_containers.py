"""What torch is given where the system or a library wants something that stalloc does not have."""

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

BEGIN = """
from stalloc import device
device.activate("virtual")
"""


def test_a_process_that_may_not_read_its_own_memory_is_served(run_program):
    done = run_program(
        BEGIN
        + """
import builtins
own_open = builtins.open
def refusing(file, *arguments, **options):
    if str(file) == "/proc/self/mem":
        raise PermissionError(13, "Permission denied", str(file))
    return own_open(file, *arguments, **options)
builtins.open = refusing
import torch
import stalloc
stalloc.install(device="virtual")
held = torch.empty(1 << 20, device="cuda")
assert stalloc.statistics()[0].run_allocated_peak_bytes == 4 << 20
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_may_be_registered_with_nccl_for_nothing(run_program):
    done = run_program(
        BEGIN
        + """
import torch
import torch.distributed as dist
import stalloc
stalloc.install(device="virtual")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
backend = dist.group.WORLD._get_backend(torch.device("cuda"))
pool = torch.cuda.MemPool()
backend.register_mem_pool(pool)
with torch.cuda.use_mem_pool(pool):
    dist.all_reduce(torch.zeros(1000, device="cuda"))
backend.deregister_mem_pool(pool)
dist.destroy_process_group()
"""
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("stalloc:")]
    assert said == [
        "stalloc: a pool is not registered with NCCL, whose collectives copy as without it: the memory of a pool is "
        "not apart under stalloc."
    ]
