"""Tests of properties: with few examples always, and with many among the slow ones."""

from collections.abc import Callable
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
