"""The state of an optimizer, that knows when somebody looks at it.

Contract: who looks sees whole tensors; a copy, or a pickle, is what it would be without paging.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Pager(Protocol):
    """What moves the tensors of an optimizer's state."""

    def looked(self) -> None:
        """Somebody else reads or changes state from here on: wait until it is whole."""

    def of_device(self, parameter: Any, values: Any) -> Any:
        """The state of a parameter as it would be without paging."""


class WatchedState(defaultdict[Any, Any]):
    """An optimizer's state that, before anybody but the step reads it, waits for what is on its way to the host.

    A copy, or a pickle, of it is as it would be without paging.
    """

    def __init__(self, pager: Pager, state: Any) -> None:
        super().__init__(dict, state)
        self._pager, self._watched = pager, True

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A context for work that knows what is on its way, in which nothing waits."""
        before, self._watched = self._watched, False
        try:
            yield
        finally:
            self._watched = before

    def _look(self) -> None:
        if self._watched:
            self._pager.looked()

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return super().get(key, default)

    def values(self) -> Any:
        self._look()
        return super().values()

    def items(self) -> Any:
        self._look()
        return super().items()

    def __reduce__(self) -> Any:
        found = {key: self._pager.of_device(key, values) for key, values in self.items()}
        return defaultdict, (dict, found)
