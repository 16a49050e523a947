"""The operators of PyTorch run on every card that has a name."""

from pathlib import Path
from typing import Any

import pytest

from stalloc.device import KNOWN_GPUS

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROBE = Path(__file__).parent / "programs" / "operator_probe.py"
# generations differ in which binaries, kernels and sizes are chosen; cards of one differ in little but sizes
_ONE_OF_EACH = {gpu.compute_capability[0]: name for name, gpu in KNOWN_GPUS.items()}
_ALWAYS = _ONE_OF_EACH[min(_ONE_OF_EACH)], _ONE_OF_EACH[9]
_CARDS = [pytest.param(name, marks=() if name in _ALWAYS else pytest.mark.slow, id=name) for name in KNOWN_GPUS]


@pytest.mark.parametrize("name", _CARDS)
def test_every_operator_runs(run_checks: Any, name: str) -> None:
    wrong = run_checks(_PROBE.read_text(encoding="utf-8"), name)
    if KNOWN_GPUS[name].compute_capability < (7, 5):  # torch itself refuses its cuDNN there, as on a real one
        assert "is not compatible with devices with SM < 7.5" in wrong.pop("recurrent networks")
    assert wrong == {}
