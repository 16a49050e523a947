"""The virtual GPU under a test session: put in place before anything imports torch, handed on to child processes."""

import os
import sys

import pytest

from stalloc.errors import StallocError
from stalloc.integrations.startup import chosen_device


def put_in_place(text: str) -> None:
    """Let this process and its children have the virtual GPU that `--stalloc-gpu` names. Raises UsageError."""
    from stalloc import device

    try:
        kind, gpu = chosen_device(text, "--stalloc-gpu")
        if kind != "virtual":
            return
        early = [name for name in ("torch", "cupy") if name in sys.modules]
        if early and device.active() != "virtual":
            raise pytest.UsageError(
                f"--stalloc-gpu {text} came too late: {' and '.join(early)} was imported before pytest read its "
                "options, by a plugin or by what started pytest: leave that out, or load it later from a conftest.py."
            )
        device.activate("virtual", gpu)
    except StallocError as error:
        raise pytest.UsageError(str(error)) from error
    os.environ["STALLOC_DEVICE"] = text
