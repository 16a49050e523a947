"""Recomputation of blocks that the program itself puts through torch's checkpoint: these run as they are."""

from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

CHECKPOINTED = Path(__file__).parent / "programs" / "checkpointed_blocks.py"
KINDS = ("norm", "codebook", "observer", "count")
CASES = (
    *KINDS, *(f"{kind}_reentrant" for kind in KINDS), "every_other", "every_other_reentrant", "to_the_host",
    "one_in_another", "twice", "segmented", "composed", "within_another",
)  # fmt: skip
FEW = ("norm", "observer_reentrant", "to_the_host", "twice", "within_another")  #: those that always run


@pytest.fixture(scope="module")
def checkpointed() -> dict[str, Any]:
    """Blocks in checkpoints of the program's, each with random choices of what is kept, without and with autocast."""
    found: dict[str, Any] = told_by_file(CHECKPOINTED, 2, *FEW)
    return found


@pytest.mark.slow
def test_so_it_is_of_every_kind() -> None:
    told = told_by_file(CHECKPOINTED, 2, *CASES)
    assert told == {case: {"equal": 4, "differs": 0, "raised": []} for case in CASES}


@pytest.mark.parametrize("case", FEW)
def test_what_a_checkpoint_of_the_program_changes_twice_is_changed_twice(
    checkpointed: dict[str, Any], case: str
) -> None:
    assert checkpointed[case] == {"equal": 4, "differs": 0, "raised": []}
