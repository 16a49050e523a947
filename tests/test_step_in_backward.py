"""The optimizer's step in the backward pass: parameters are the same to the last bit, or a sentence says why."""

from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

PROGRAM = Path(__file__).parent / "programs" / "step_in_backward.py"
OPTIMIZERS = (
    "SGD", "SGD, plain", "Adam", "AdamW", "AdamW, foreach", "AdamW, fused", "Adamax", "Adadelta", "Adagrad",
    "Adafactor", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Muon",
)  # fmt: skip
EQUAL = ("plain", "zeroed_after", "scheduled", "frozen_later", "reloaded")
REFUSED = {
    "accumulated": "modified by an inplace operation",  # autograd itself says so
    "clipped": "a gradient is read",
    "clipped_later": "a gradient is read",
    "scaled": "a gradient is read",
    "logged": "a gradient is read",
    "logged_later": "a gradient is read after the optimizer's step",
    "never_zeroed": "accumulated over several steps of the optimizer",
    "replaced": "a gradient is read or set",
    "skipped": "a gradient is read",
    "accumulated_by_hand": "accumulated over several backward passes",
    "accumulated_in_turn": "a forward pass (Linear) comes between",
    "warmed_up": "options of the optimizer are changed",
    "by_closure": "by a closure",
    "penalized": "differentiated once more",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM)
    return found


@pytest.mark.parametrize("name", [*OPTIMIZERS, *EQUAL])
def test_parameters_and_state_are_the_same_and_no_gradient_is_left(found: dict[str, Any], name: str) -> None:
    assert found[name] == {"equal": True, "gradients_left": 0}


@pytest.mark.parametrize("name", REFUSED)
def test_who_needs_gradients_or_old_parameters_is_told(found: dict[str, Any], name: str) -> None:
    assert REFUSED[name] in found[name]["refused"]
    told = found[name]["refused"].endswith("Let the optimizer's step stay after the backward pass.")
    assert told == (name != "accumulated")


def test_optimizers_that_mix_parameters_stay_as_they_are(found: dict[str, Any]) -> None:
    assert found["said"] == [
        "LBFGS is not known to update each parameter by its own gradient and state alone: its step stays after the "
        "backward pass."
    ]
