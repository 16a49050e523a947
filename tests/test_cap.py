"""A cap: what is saved for backward goes when a request does not fit, and nothing of the program's numbers changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc, told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAMS = Path(__file__).parent / "programs"
TWINS, CAPPED = PROGRAMS / "capped_twins.py", PROGRAMS / "capped_programs.py"
GIB = 1 << 30

#: the cases that always run
FEW = ("mixture", "tree", "blocks", "autocast", "counting", "double backward", "changed in place")
WAYS = ("dropped", "both", "moved")


@pytest.fixture(scope="module")
def twins() -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(TWINS, *FEW)
    return found


def test_losses_gradients_and_parameters_are_the_programs_own_to_the_last_bit(twins: dict[str, Any]) -> None:
    check_equal(twins, len(FEW) - 1)


@pytest.mark.slow
def test_they_are_so_whatever_a_program_does() -> None:
    check_equal(told_by_file(TWINS), 12)


def check_equal(twins: dict[str, Any], num_cases: int) -> None:
    cases = {name: one for name, one in twins.items() if not one["as_it_is"]}
    assert len(cases) == num_cases
    assert [
        (name, way, one[way]["error"]) for name, one in cases.items() for way in WAYS if not one[way]["equal"]
    ] == []
    assert min(one["both"]["num_evictions"] for one in cases.values()) > 0, "something was evicted in each"


def test_blocks_run_again_or_move_and_come_back(twins: dict[str, Any]) -> None:
    dropped, moved = twins["blocks"]["dropped"], twins["blocks"]["moved"]
    assert dropped["num_recomputed"] > 0 and dropped["moved_bytes"] == 0
    assert moved["moved_bytes"] > 0


def test_a_block_that_cannot_run_twice_moves_instead(twins: dict[str, Any]) -> None:
    counting = twins["counting"]
    assert counting["dropped"]["num_recomputed"] == counting["both"]["num_recomputed"] == 0
    assert counting["both"]["moved_bytes"] > 0


def test_what_is_changed_in_place_before_backward_is_an_error_as_without_a_cap(twins: dict[str, Any]) -> None:
    changed = twins["changed in place"]
    assert "modified by an inplace operation" in changed["as_it_is"]
    for way in WAYS:
        assert changed[way]["error"].startswith(
            "OffloadError: a tensor of shape (512, 64) that backward needs was chang"
        )
