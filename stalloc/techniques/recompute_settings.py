"""Which blocks of a program are recomputed, and what each keeps: the settings of recomputation, as data.

Contract: settings name blocks by the order in which models are first called, by their name within the model (a model
that is a block itself has that of its class) and by class; operations by position and name. They hold no objects of the
program, so they can be written to a file, and whatever such a file says, settings can only choose what is recomputed.
"""

from dataclasses import dataclass
from typing import Any

_MAX_BLOCKS, _MAX_KEPT, _MAX_NAME = 100_000, 100_000, 500


@dataclass(frozen=True)
class BlockSettings:
    """One block that is recomputed."""

    model: int  #: the number of its model
    name: str  #: within the model
    kind: str  #: its class
    keep: tuple[tuple[int, str], ...] = ()  #: operations whose results are kept: position in the block, name


@dataclass(frozen=True)
class RecomputeSettings:
    """All blocks that are recomputed; none: the program as it is."""

    blocks: tuple[BlockSettings, ...] = ()

    def of_model(self, model: int) -> dict[str, BlockSettings]:
        """The settings of one model's blocks, by the block's name."""
        return {block.name: block for block in self.blocks if block.model == model}

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values (JSON) for a file, in which blocks with the same operations share a row."""
        rows: dict[tuple[int, str, tuple[tuple[int, str], ...]], list[str]] = {}
        for block in self.blocks:
            rows.setdefault((block.model, block.kind, block.keep), []).append(block.name)
        return [
            {"model": model, "kind": kind, "keep": [list(one) for one in keep], "names": names}
            for (model, kind, keep), names in rows.items()
        ]


def settings_from_json(rows: Any) -> RecomputeSettings:
    """The settings that `as_json` wrote. Raises ValueError for anything else."""
    _check(isinstance(rows, list) and len(rows) <= _MAX_BLOCKS, "its settings are no list")
    blocks: list[BlockSettings] = []
    for row in rows:
        _check(isinstance(row, dict) and set(row) == {"model", "kind", "keep", "names"}, "a row of settings is damaged")
        _check(type(row["model"]) is int and 0 <= row["model"] < _MAX_BLOCKS, "a setting names no model")
        _check(_is_name(row["kind"]), "a setting names no class")
        _check(isinstance(row["names"], list) and all(map(_is_name, row["names"])), "a setting names no blocks")
        _check(isinstance(row["keep"], list) and len(row["keep"]) <= _MAX_KEPT, "what is kept is no list")
        for one in row["keep"]:
            is_pair = isinstance(one, list) and len(one) == 2 and type(one[0]) is int and _is_name(one[1])
            _check(is_pair and 0 <= one[0] < 2**31, "what is kept is no operation")
        _check(len(blocks) + len(row["names"]) <= _MAX_BLOCKS, "its settings name too many blocks")
        keep = tuple((position, name) for position, name in row["keep"])
        blocks += [BlockSettings(row["model"], name, row["kind"], keep) for name in row["names"]]
    return RecomputeSettings(tuple(blocks))


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MAX_NAME


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
