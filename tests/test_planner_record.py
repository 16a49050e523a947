"""Plan files: what is written is read, equal plans are equal bytes, and nothing else passes for a plan."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest

from stalloc import planner
from stalloc.errors import BadInputError
from stalloc.planner import Plan, load_plans, plan_arrays, plans_to_bytes, save_plans


def some_plan(device: int = 0) -> Plan:
    start, size = np.arange(9), np.arange(9) * 100
    layout = plan_arrays(start, start + 3, size)
    return Plan(
        offset=layout.offset,
        size=size,
        start=start,
        end=start + 3,
        stream=np.zeros(9, np.int64),
        device=device,
        alignment=512,
        peak_bytes=layout.peak_bytes,
        lower_bound_bytes=layout.lower_bound_bytes,
        optimal=True,
        method="for [the] test",
        kind="trace",
        provenance={"source": "ünïcode", "options": {"alignment": 512}},
    )


def test_what_is_written_is_read(tmp_path):
    plans = [some_plan(0), some_plan(3)]
    save_plans(tmp_path / "a.plan.npz", plans)
    read = load_plans(tmp_path / "a.plan.npz")
    assert [plan.device for plan in read] == [0, 3]
    for before, after in zip(plans, read, strict=True):
        for field in dataclasses.fields(Plan):
            assert np.array_equal(getattr(before, field.name), getattr(after, field.name)), field.name


def test_equal_plans_are_equal_bytes(tmp_path):
    save_plans(tmp_path / "a.plan.npz", [some_plan()])
    save_plans(tmp_path / "b.plan.npz", [some_plan()])
    assert (tmp_path / "a.plan.npz").read_bytes() == (tmp_path / "b.plan.npz").read_bytes()


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "a.plan.npz").write_text("old")
    save_plans(tmp_path / "a.plan.npz", [some_plan()])
    assert load_plans(tmp_path / "a.plan.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan.npz"]


def test_a_folder_that_does_not_exist_is_one_sentence(tmp_path):
    with pytest.raises(BadInputError, match="cannot write"):
        save_plans(tmp_path / "none" / "a.plan.npz", [some_plan()])


def rewritten(path, change) -> None:
    """Apply `change` to the members of a plan file, a dictionary of name to array."""
    with np.load(path) as archive:
        members = dict(archive)
    header = json.loads(bytes(members["header"]).decode())
    change(members, header)
    if "header" in members:
        members["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **members)


CHANGES = {
    "no header": lambda members, header: members.pop("header"),
    "no column": lambda members, header: members.pop("0.offset"),
    "short column": lambda members, header: members.update({"0.size": members["0.size"][:-1]}),
    "float column": lambda members, header: members.update({"0.size": members["0.size"] * 1.5}),
    "two-dimensional column": lambda members, header: members.update({"0.size": members["0.size"].reshape(3, 3)}),
    "object column": lambda members, header: members.update({"0.size": np.array([print] * 9, object)}),
    "other format": lambda members, header: header.update(format="a trace"),
    "newer version": lambda members, header: header.update(version=99),
    "no list of plans": lambda members, header: header.update(plans={"0": 1}),
    "plans that are none": lambda members, header: header.update(plans=[1]),
    "negative peak": lambda members, header: header["plans"][0].update(peak_bytes=-1),
    "peak as text": lambda members, header: header["plans"][0].update(peak_bytes="1"),
    "no peak": lambda members, header: header["plans"][0].pop("peak_bytes"),
    "unknown kind": lambda members, header: header["plans"][0].update(kind="guess"),
    "zero alignment": lambda members, header: header["plans"][0].update(alignment=0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_file_that_is_not_quite_a_plan_is_one_sentence(tmp_path, change):
    path = tmp_path / "a.plan.npz"
    save_plans(path, [some_plan()])
    rewritten(path, change)
    with pytest.raises(BadInputError) as caught:
        load_plans(path)
    assert "\n" not in str(caught.value)
    assert "a.plan.npz" in str(caught.value)


def test_a_file_of_the_release_before_reads_as_today(tmp_path):
    path, columns = tmp_path / "a.plan.npz", {name: np.arange(3) for name in planner.plan_record.SCHEDULE_COLUMNS}
    plan = dataclasses.replace(some_plan(), kind="program", cycle_start=1, cycle_end=4, num_prologue=1, **columns)
    save_plans(path, [plan])

    def older(members, header) -> None:
        header["version"] = 2
        for name in [name for name in members if ".schedule_" in name]:
            members[name.replace("schedule_", "tape_")] = members.pop(name)
        for name in ("cycle_start", "cycle_end"):
            header["plans"][0][name.replace("cycle_", "ring_")] = header["plans"][0].pop(name)

    rewritten(path, older)
    assert plans_to_bytes(load_plans(path)) == plans_to_bytes([plan])


def test_names_of_the_release_before_still_work_and_say_so():
    plan = some_plan()
    with pytest.warns(DeprecationWarning, match="schedule_size"):
        assert plan.tape_size is plan.schedule_size
    with pytest.warns(DeprecationWarning, match="cycle_end"):
        assert plan.ring_end == plan.cycle_end
    with pytest.warns(DeprecationWarning, match="plan_schedule"):
        assert planner.plan_tape is planner.plan_schedule
    with pytest.warns(DeprecationWarning, match="cycle="):
        layout = planner.plan_arrays([8, 1], [12, 3], [4, 4], alignment=1, ring=(0, 10))
    assert layout.peak_bytes == planner.plan_arrays([8, 1], [12, 3], [4, 4], alignment=1, cycle=(0, 10)).peak_bytes == 8


def array_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def zip_bytes(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        b"PK\x03\x04 cut short",
        b"\x80\x04N.",
        array_bytes(np.arange(3)),
        zip_bytes(a=b"x"),
        zip_bytes(header=b"["),
    ],
    ids=["empty", "two letters", "cut short", "pickle", "one array", "zip of something", "header that is no array"],
)
def test_other_files_are_one_sentence(tmp_path, content):
    (tmp_path / "a.plan.npz").write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        load_plans(tmp_path / "a.plan.npz")
    assert "\n" not in str(caught.value)


def test_a_plan_cut_anywhere_is_one_sentence(tmp_path):
    path = tmp_path / "a.plan.npz"
    save_plans(path, [some_plan()])
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInputError):
            load_plans(path)


def test_a_plan_with_any_byte_changed_is_read_or_refused_but_never_crashes(tmp_path):
    path = tmp_path / "a.plan.npz"
    save_plans(path, [some_plan()])
    whole = path.read_bytes()
    rng = np.random.default_rng(11)
    for place in rng.integers(0, len(whole), 300).tolist():
        broken = bytearray(whole)
        broken[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(broken))
        try:
            assert all(isinstance(plan, Plan) for plan in load_plans(path))
        except BadInputError as error:
            assert "\n" not in str(error)  # noqa: PT017
