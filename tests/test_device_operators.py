"""The operators of PyTorch run on cards of every kind that has a name."""

from pathlib import Path
from typing import Any

import pytest

from stalloc.device import KNOWN_GPUS

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROBE = Path(__file__).parent / "programs" / "operator_probe.py"


def _cards() -> list[object]:
    """The smallest and the largest card of each compute capability: the others of one lie between them in all sizes.

    Generations differ in which binaries, kernels and sizes are chosen. Always run are the oldest, which has no cuDNN,
    and one that many have.
    """
    by_capability: dict[tuple[int, int], list[str]] = {}
    for name, gpu in sorted(KNOWN_GPUS.items(), key=lambda one: (one[1].num_multiprocessors, one[1].total_bytes)):
        by_capability.setdefault(gpu.compute_capability, []).append(name)
    names = sorted({name for cards in by_capability.values() for name in (cards[0], cards[-1])})
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("V100-16GB", "H200"))) for name in names]


@pytest.mark.parametrize("name", _cards())
def test_every_operator_runs(run_checks: Any, name: str) -> None:
    wrong = run_checks(_PROBE.read_text(encoding="utf-8"), name)
    if KNOWN_GPUS[name].compute_capability < (7, 5):  # torch itself refuses its cuDNN there, as on a real one
        assert "is not compatible with devices with SM < 7.5" in wrong.pop("recurrent networks")
    assert wrong == {}
