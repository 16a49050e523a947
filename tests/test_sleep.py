"""A job that sleeps: its memory goes back to the device, and comes back at the same addresses with the same bytes."""

import re
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "sleeping.py"
ASLEEP = "OutOfMemoryError: stalloc: this job sleeps, and its memory is with others: call stalloc.wake() first."


def results(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, rounds)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results(10)


@pytest.fixture(scope="module")
def colocated() -> dict[str, Any]:
    told: dict[str, Any] = told_by_file(PROGRAM.with_name("colocated.py"), 120)
    return told


def test_addresses_and_bytes_are_as_before_and_nothing_is_held_meanwhile(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["held"] <= 0.01
    assert found["kept_bytes"] > 10 << 20
    assert found["phase"] == "running on the plan"


@pytest.mark.slow
def test_a_job_sleeps_a_hundred_times_between_steps_of_training_and_inference() -> None:
    found = results(100)
    assert found["wrong"] == []
    assert found["held"] <= 0.01


def test_what_is_asked_for_while_it_sleeps_gets_one_sentence(found: dict[str, Any]) -> None:
    assert found["request"] == found["array"] == found["still_asleep"] == ASLEEP
    assert found["twice"] == "SetupError: this job sleeps already: call stalloc.wake() first."
    assert found["step"] == ""


def test_what_is_named_need_not_be_kept_and_all_else_is(found: dict[str, Any]) -> None:
    assert found["others_whole"]
    assert found["cache_lost"]
    assert found["cache_addresses"]
    assert found["dropped_keeps"] == 0
    assert found["addresses_after_drop"]


def test_what_is_tagged_sleeps_and_wakes_by_itself_and_the_rest_computes(found: dict[str, Any]) -> None:
    given_back, kept, less_used = found["kv"]
    assert 20 << 20 <= given_back <= 24 << 20  # two tensors of 12 MiB but for the pages that others live in
    assert less_used == given_back == found["kv_still_asleep"]
    assert kept == 0
    assert found["rest_computes"]
    assert found["weights_kept"] >= 6 << 20
    assert found["weights_first"]
    assert found["weights_of_all"]
    assert found["everything_back"]


def test_no_memory_is_to_be_had_before_all_of_a_job_that_slept_whole_is_awake(found: dict[str, Any]) -> None:
    assert found["part_still_asleep"] == ASLEEP


def test_a_trainer_uses_what_an_engine_in_its_process_gave_back(colocated: dict[str, Any]) -> None:
    assert "out of memory" in colocated["too_much_awake"]
    assert colocated["given_back"] >= 130 << 20
    assert colocated["rounds"] == [True] * 3  # of training, after which the engine has its addresses and bytes again
    assert colocated["phases"][1:] == ["running on the plan"] * 3


def test_what_has_a_place_of_the_plan_sleeps_too(colocated: dict[str, Any]) -> None:
    assert colocated["planned_given_back"] >= 30 << 20
    assert colocated["planned_whole"]


def test_waking_without_room_says_how_much_is_missing_and_loses_nothing(colocated: dict[str, Any]) -> None:
    waking = (
        r"SetupError: waking needs 100.00 MiB of device 0, which has (\d+)\.00 MiB, (\d+)\.00 MiB too few: free what "
    )
    assert (parts := re.match(waking, colocated["no_room"]))
    assert int(parts[1]) + int(parts[2]) == 100
    assert colocated["others_go_on"] == ""
    assert colocated["others_whole"]
    assert colocated["weights_whole"]


def test_nothing_is_moved_while_some_of_the_memory_sleeps(colocated: dict[str, Any]) -> None:
    assert colocated["compact"].startswith("SetupError: memory of device 0 is asleep, and nothing moves meanwhile")


def test_after_all_is_awake_memory_is_one_again(colocated: dict[str, Any]) -> None:
    assert colocated["after_all"] == ""
    assert colocated["held_at_end"] <= 12 << 20  # six sizes, each with a part of a page


def test_bytes_are_kept_whatever_is_allocated_freed_and_woken_meanwhile(colocated: dict[str, Any]) -> None:
    assert colocated["last_wake"] == ""
    assert colocated["wrong"] == []
    assert "are asleep, and not on the device." in colocated["refused_asleep"]


def test_a_page_that_others_live_in_stays(found: dict[str, Any]) -> None:
    assert found["tiny_given_back"] == 0
    assert found["after_nothing"] == ""
    assert found["unknown_tag"].startswith("BadInputError: nothing is tagged 'cache'")


def test_what_cannot_be_done_is_one_sentence_and_loses_nothing(found: dict[str, Any]) -> None:
    assert "cannot be kept in /nonexistent/folder (No such file or directory)" in found["no_folder"]
    assert found["no_such_place"].endswith("choose one of host, disk, drop.")
    assert found["no_room"].startswith("SetupError: waking needs ")
    assert found["no_room"].endswith(" too few: free what was allocated meanwhile, or let another job sleep first.")
