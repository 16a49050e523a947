"""The file of a fit: what was saved comes back, and anything else is one sentence."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stalloc.errors import BadInputError
from stalloc.fitting import Candidate, Fit
from stalloc.fitting.fit_record import Program, load_fit, undominated
from stalloc.techniques.technique_settings import BlockSettings, RecomputeSettings, TechniqueSettings, TierSettings

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


def sample() -> Fit:
    blocks = (BlockSettings(0, "blocks.0", "Block", ((3, "aten.mm.default"),)), BlockSettings(0, "blocks.1", "Block"))
    return Fit(
        program=Program(name="a.py", content="0" * 64, arguments=("-x",), torch="2", stalloc="0", gpu="G"),
        budget_bytes=5, gpu_bytes=9, step_seconds=0.5, estimate="none", best=0, plan=b"plan", notes=("one",),
        candidates=(Candidate(what="as it is", technique="none", needed_bytes=4),),
        settings=TechniqueSettings(RecomputeSettings(blocks)),
    )  # fmt: skip


def test_the_pareto_set_has_each_way_that_no_other_beats_in_bytes_and_seconds() -> None:
    def way(device: int, host: int, disk: int, seconds: float, refused: str = "") -> Candidate:
        return Candidate(
            what="", technique="", needed_bytes=device, host_bytes=host, disk_bytes=disk, added_seconds=seconds,
            refused=refused,
        )  # fmt: skip

    ways = [way(9, 0, 0, 0), way(5, 0, 0, 2), way(5, 1, 0, 2), way(4, 3, 0, 1), way(4, 0, 3, 1), way(1, 0, 0, 0, "no")]
    assert undominated(ways) == [0, 1, 3, 4]
    assert undominated([*ways, way(4, 0, 0, 1)]) == [0, 6]
    assert undominated([ways[0]] * 2) == [0, 1]


def test_a_fit_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "a.fit.npz"
    sample().save(file)
    assert load_fit(file) == sample()
    assert sample().to_bytes() == sample().to_bytes()
    with pytest.raises(BadInputError, match=r"does not end in \.fit\.npz"):
        sample().save(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "stalloc plan"),
        ("version", 99),
        ("best", 7),
        ("best", True),
        ("budget_bytes", -1),
        ("budget_bytes", 1e300),
        ("step_seconds", float("nan")),
        ("candidates", {}),
        ("candidates", [{"what": "x"}]),
        ("program", None),
        ("notes", [3]),
        ("settings", {"recompute": [{"model": 0, "kind": "B", "keep": [[-1, "x"]], "names": ["a"]}]}),
        ("settings", {"recompute": [{"model": 0, "kind": "B", "keep": [], "names": [["a"]]}]}),
        ("settings", {"recompute": [{"model": "0", "kind": "B", "keep": [], "names": ["a"]}]}),
        ("settings", []),
        ("settings", {}),
        ("estimate", "x" * 5000),
    ],
)
def test_a_fit_file_with_anything_else_in_it_is_one_sentence(tmp_path: Path, name: str, value: object) -> None:
    file = tmp_path / "a.fit.npz"
    sample().save(file)
    with np.load(file) as columns:
        header, plan = json.loads(columns["header"].tobytes()), columns["plan"]
    header[name] = value
    with file.open("wb") as out:
        np.savez(out, header=np.frombuffer(json.dumps(header).encode(), np.uint8), plan=plan)
    with pytest.raises(BadInputError, match="is not a fit"):
        load_fit(file)


def test_settings_that_older_fits_lack_have_their_defaults() -> None:
    told = {"recompute": sample().settings.recompute.as_json(), "tiers": {"host_bytes": 7, "paged_window_bytes": 1}}
    settings = TechniqueSettings.from_json(told)
    tiers = TierSettings(host_bytes=7, paged_window_bytes=1)
    assert settings == TechniqueSettings(sample().settings.recompute, tiers=tiers)
    assert TechniqueSettings.from_json(settings.as_json()) == settings
    for newer in ({**told, "of_tomorrow": 1}, {**told, "tiers": {"of_tomorrow": 1}}):
        with pytest.raises(ValueError, match=r"does not know, of_tomorrow|is damaged"):
            TechniqueSettings.from_json(newer)


def test_damaged_bytes_are_one_sentence(tmp_path: Path) -> None:
    file, whole = tmp_path / "a.fit.npz", sample().to_bytes()
    random = np.random.default_rng(17)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.integers(len(whole), size=3):
            damaged[place] = random.integers(256)
        file.write_bytes(bytes(damaged[: random.integers(1, len(whole) + 1)]))
        with contextlib.suppress(BadInputError):
            assert isinstance(load_fit(file), Fit)


def test_a_fit_tells_what_it_is_of() -> None:
    mine = sample().program
    assert mine.difference(mine) == ""
    assert "another program" in mine.difference(replace(mine, content="1" * 64))
    assert "torch 3, and this is 2" in mine.difference(replace(mine, torch="3"))
    assert "gpu H, and this is G" in mine.difference(replace(mine, gpu="H"))
