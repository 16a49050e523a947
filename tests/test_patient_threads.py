"""Threads of OpenMP wait without a processor where programs are tried, and the program's variables are its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import ctypes, os, sys
from stalloc.threads import patient_threads
with patient_threads():
    ctypes.CDLL(sys.argv[1])
print("left", os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(("given", "waits"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_what_is_loaded_waits_without_a_processor_unless_the_user_has_said_how(given: str | None, waits: str) -> None:
    found = importlib.util.find_spec("torch")
    libraries = [] if found is None else [*Path(str(found.origin)).parent.glob("lib/libgomp*")]
    if not libraries:
        pytest.skip("this torch brings no OpenMP of GNU's")
    variables = os.environ | {"OMP_DISPLAY_ENV": "true"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    command = [sys.executable, "-c", LOAD, str(libraries[0])]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert f"OMP_WAIT_POLICY = '{waits}'" in done.stderr
    assert done.stdout.strip() == f"left {given}"
