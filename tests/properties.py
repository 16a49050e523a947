"""Tests that are true of much: properties with few examples always and with many among the slow ones, and variants."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings


def holds_for(*strategies: Any, few: int, many: int) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Make a test of a function that checks one example, drawn from the strategies, always the same ones."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("num_examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(num_examples: int) -> None:
            settings(max_examples=num_examples, deadline=None, derandomize=True)(given(*strategies)(check))()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate


def variants(names: str, rows: Iterable[Any], *, always: int = 1, ids: Sequence[str] | None = None) -> Any:
    """`pytest.mark.parametrize`, with all but the first few variants among the slow tests."""
    found = []
    for number, row in enumerate(rows):
        one = row if hasattr(row, "marks") else pytest.param(*(row if "," in names else (row,)))
        marks = [*one.marks, *([pytest.mark.slow] * (number >= always))]
        found.append(pytest.param(*one.values, id=ids[number] if ids else one.id, marks=marks))
    return pytest.mark.parametrize(names, found)
