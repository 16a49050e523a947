"""The operators of PyTorch run on every card that has a name."""

from pathlib import Path
from typing import Any

import pytest

from stalloc.device import KNOWN_GPUS

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROBE = Path(__file__).parent / "programs" / "operator_probe.py"


def _cards() -> list[object]:
    """All of them; always the oldest, which has no cuDNN, and one that many have."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("V100-16GB", "H200"))) for name in KNOWN_GPUS]


@pytest.mark.parametrize("name", _cards())
def test_every_operator_runs(run_checks: Any, name: str) -> None:
    wrong = run_checks(_PROBE.read_text(encoding="utf-8"), name)
    if KNOWN_GPUS[name].compute_capability < (7, 5):  # torch itself refuses its cuDNN there, as on a real one
        assert "is not compatible with devices with SM < 7.5" in wrong.pop("recurrent networks")
    assert wrong == {}
