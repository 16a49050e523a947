"""numba.cuda, for which the virtual GPU has neither driver nor compiler."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

USE = """
import numpy as np
from stalloc import device
device.activate("virtual")
from numba import cuda
assert not cuda.is_available()
{}
"""
KERNEL = "cuda.jit(lambda numbers: None)[1, 1](np.zeros(2))"


@pytest.mark.parametrize("use", ["cuda.to_device(np.zeros(2))", "cuda.device_array(2)", "cuda.synchronize()", KERNEL])
def test_numba_says_that_it_does_not_run(use: str, run_program: Callable[..., CompletedProcess[str]]) -> None:
    said = run_program(USE.format(use)).stderr
    assert "CudaSupportError: Error at driver init" in said
    assert "numba.cuda does not run on the virtual GPU" in said.splitlines()[-1]
