"""`stalloc.sweep`: dry runs on any executor give the answers of one after the other, and what is lost is done again."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import stalloc
from stalloc.errors import BadInputError
from stalloc.sizing.sweep import Swept

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = """
import sys, cupy
cupy.empty(int(sys.argv[1]) << 20, dtype=cupy.uint8)
"""
MIB = 1 << 20


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "size.py"
    file.write_text(PROGRAM)
    return str(file)


class LosesFirst(Executor):
    """Of each work, the first worker is lost."""

    def __init__(self, num_lost: int) -> None:
        self._pool, self._num_lost, self.given = ThreadPoolExecutor(2), num_lost, list[str]()

    def submit(self, work: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        self.given.append(args[0][1])
        if self.given.count(args[0][1]) > self._num_lost:
            return self._pool.submit(work, *args)
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("the worker is gone"))
        return future


def needed(one: Swept) -> int:
    """MiB."""
    assert one.told is not None, one.failure
    return int(one.told["native"]["needed_bytes"]) // MIB


def test_answers_are_in_order_a_failure_is_named_and_the_rest_goes_on(program: str) -> None:
    found = stalloc.sweep([[program, "3"], [program, "wrong"], [program, "5"]], ["--gpu", "H100"])
    assert [one.program[1] for one in found] == ["3", "wrong", "5"]
    assert [needed(found[0]), needed(found[2])] == [3, 5]
    assert found[1].told is None
    assert "failed" in found[1].failure
    assert not any(one.lost for one in found)


def test_a_run_whose_worker_is_lost_is_done_again_and_says_so(program: str) -> None:
    executor = LosesFirst(1)
    (one,) = stalloc.sweep([[program, "3"]], executor=executor)
    assert needed(one) == 3
    assert one.lost == ("ConnectionError: the worker is gone",)
    (one,) = stalloc.sweep([[program, "3"]], executor=LosesFirst(9), tries=2)
    assert one.told is None
    assert "lost 2 times" in one.failure


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(BadInputError, match="tries is 0"):
        stalloc.sweep([["a.py"]], tries=0)
    with pytest.raises(BadInputError, match="--json"):
        stalloc.sweep([["a.py"]], ["--json", "-"])


ENDS_ITS_WORKER = (
    PROGRAM
    + """
import os, pathlib, signal
marker, workers = pathlib.Path(sys.argv[2]), {int(word) for word in sys.argv[3:]}
if workers and not marker.exists():
    marker.touch()
    one = os.getpid()
    while one not in workers:
        one = int(pathlib.Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
    os.kill(one, signal.SIGKILL)
"""
)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    if find_spec("distributed") is None:
        pytest.skip("dask.distributed is not installed")
    import dask
    from distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": getattr(request, "param", 3)}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as local,
        Client(local) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_local_dask_cluster_gives_the_answers_of_64_runs(program: str, cluster: Any) -> None:
    sizes = range(2, 130, 2)  # MiB
    found = stalloc.sweep([[program, str(size)] for size in sizes], executor=cluster.get_executor())
    assert [needed(one) for one in found] == [*sizes]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [0, 3], indirect=True)
def test_a_run_whose_dask_worker_is_killed_is_done_again(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(ENDS_ITS_WORKER)
    marker, workers = tmp_path / "marker", [str(pid) for pid in cluster.run(os.getpid).values()]
    programs = [[str(file), str(size), str(marker), *(workers if size == 4 else [])] for size in (2, 4, 6, 8)]
    allowed_failures = cluster.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures)
    found = stalloc.sweep(programs, ["--keep-files"], executor=cluster.get_executor())
    assert marker.exists()
    assert [needed(one) for one in found] == [2, 4, 6, 8]
    if allowed_failures == 0:  # otherwise Dask itself does it again, and tells nobody
        assert len(found[1].lost) == 1
        assert "KilledWorker" in found[1].lost[0]
