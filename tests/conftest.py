"""Where tests find what is not in the repository."""

import os
from pathlib import Path

import pytest


def _shared_directory() -> Path | None:
    """$STALLOC_SHARED, else a directory named `shared` beside the checkout, else None."""
    named = os.environ.get("STALLOC_SHARED")
    directory = Path(named) if named else Path(__file__).parents[1].parent / "shared"
    return directory if directory.is_dir() else None


def _shared(name: str) -> Path:
    directory = _shared_directory()
    if directory is None or not (directory / name).is_dir():
        pytest.skip(f"no shared {name}: set STALLOC_SHARED to the directory that holds {name}/")
    return directory / name


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The directory of recorded traces of real programs; the test is skipped where it is absent."""
    return _shared("traces")


@pytest.fixture(scope="session")
def shared_instances() -> Path:
    """The directory of published packing instances; the test is skipped where it is absent."""
    return _shared("instances")
