"""Mutations of values that JSON and pickles hold: containers, numbers and strings, changed in place."""

import math
import random
from typing import Any

TEXTS = ("", "0", "-1", "alloc", "x" * 300, "\x1b[2J", "a\nb", "\u202e", "[/]", "9" * 30, "1e999", "../../x", "\ud800")
NUMBERS = (0, 1, -1, 2**31, 2**32, 2**44, 2**44 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**40)
OTHERS = (0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, True, False, None)
DEPTHS = (3, 50, 900, 990)


def mutate_tree(rng: random.Random, root: Any) -> Any:
    """The value with one thing changed somewhere; containers of it are changed in place."""
    parent, key = _place(rng, root)
    if parent is None:
        return _other_value(rng, root)
    action = rng.randrange(8)
    if action < 3:
        parent[key] = _other_value(rng, parent[key])
    elif action == 3:
        del parent[key]
    elif action == 4:
        _duplicate(rng, parent, key)
    elif action == 5:
        other = rng.choice(list(_keys(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif action == 6 and isinstance(parent, dict):
        parent[rng.choice([*TEXTS, *map(str, parent)])] = parent.pop(key)
    else:
        donor, name = _place(rng, root)
        if donor is not None and not isinstance(donor[name], dict | list):  # containers could come to hold themselves
            parent[key] = donor[name]
    return root


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _place(rng: random.Random, root: Any) -> tuple[Any, Any]:
    """A container and a key of it, at any depth; None if the value holds nothing."""
    parent, key, at = None, None, root
    while isinstance(at, dict | list) and len(at):
        parent, key = at, rng.choice(list(_keys(at))) if isinstance(at, dict) else rng.randrange(len(at))
        if rng.random() < 0.12:
            break
        at = at[key]
    return parent, key


def _duplicate(rng: random.Random, parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[rng.choice(TEXTS)] = parent[key]
    elif rng.random() < 0.9:
        parent.insert(rng.randrange(len(parent) + 1), parent[key])
    else:
        parent[key:key] = [parent[key]] * rng.choice([10, 1000])


def _other_value(rng: random.Random, value: Any) -> Any:
    choice = rng.randrange(7)
    if isinstance(value, int | float) and choice < 3:
        return rng.choice([value + 1, value - 1, -value, value * 2, value + 2**32, str(value), float(value % 2**60)])
    if isinstance(value, list) and choice < 2:
        return value[::-1] if choice else value[: rng.randrange(len(value) + 1)]
    if isinstance(value, str) and choice < 2:
        return value[: rng.randrange(len(value) + 1)] + rng.choice(TEXTS)
    if choice == 3:
        return rng.choice(TEXTS)
    if choice == 4:
        return rng.choice([[], {}, [value], {"": value}, [[value]] * 3, _nested(rng.choice(DEPTHS))])
    return rng.choice(NUMBERS if choice < 6 else OTHERS)


def _nested(depth: int) -> Any:
    value: Any = 0
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value
