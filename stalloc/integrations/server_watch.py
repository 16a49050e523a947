"""What an inference server takes beside its requests: tokens that known engines cache, graphs, and phases of sleep.

Contract: the program is not changed: functions of torch and of engines are called as before, and looked at after. What
an engine's release names otherwise is not known, and no error.

A phase is from each sleep or wake to the next. Of those only the virtual GPU's own peak begins anew with each; phases
that begin in the same way, with the same tags asleep, are one, of which the most of each figure is kept. vLLM's
CuMemAllocator sleeps as a whole, and wakes by tags: it unmaps what has its tags, and maps it again. Where waking fails,
it keeps what it has mapped by then, and is taken to sleep on.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from stalloc.device import virtual
from stalloc.imports import after_import
from stalloc.integrations.installation import installation
from stalloc.trace.sites import Frame, site_name

_VLLM = "vllm.device_allocator.cumem"


def _of_transformers(cache: Any) -> int:
    tokens = getattr(cache, "max_tokens_read", None)
    return int(tokens if tokens is not None else cache.num_blocks * cache.block_size)


def _of_nano_vllm(runner: Any) -> int:
    return int(runner.config.num_kvcache_blocks * runner.config.kvcache_block_size)


def _of_lmdeploy(engine: Any) -> int:
    cache = engine.cache_config
    return int((cache.num_gpu_blocks - cache.num_reserved_gpu_blocks) * cache.block_size)


#: module, class, the method after which the cache is there, and how many tokens it has then. vLLM and SGLang print it.
_ENGINES: tuple[tuple[str, str, str, Callable[[Any], int]], ...] = (
    ("transformers.generation.continuous_batching.cache", "PagedAttentionCache", "__init__", _of_transformers),
    ("nanovllm.engine.model_runner", "ModelRunner", "allocate_kv_cache", _of_nano_vllm),
    ("lmdeploy.pytorch.engine.cache_engine", "CacheEngine", "__init__", _of_lmdeploy),
)


class ServerWatch:
    """Notes what CUDA graphs reserve and how many tokens an engine caches, in this process from `begin` on."""

    def __init__(self) -> None:
        self._num_graphs = 0
        self._pools: dict[Any, int] = {}  # of graphs: the most that each reserved
        self._tokens: int | None = None

    def begin(self) -> None:
        installation.sleep_phases = SleepPhases()
        after_import(_VLLM, partial(_watch_vllm, installation.sleep_phases))
        after_import("torch", self._watch_graphs)
        for module, owner, method, tokens in _ENGINES:
            after_import(module, partial(self._watch_engine, module, owner, method, tokens))

    def _watch_graphs(self) -> None:
        graph: Any = sys.modules["torch"].cuda.CUDAGraph
        end = graph.capture_end

        def capture_end(captured: Any) -> Any:
            told = end(captured)
            pool = captured.pool()
            self._pools[pool] = max(self._pools.get(pool, 0), _reserved_by(pool))
            self._num_graphs += 1
            return told

        graph.capture_end = capture_end

    def _watch_engine(self, module: str, owner: str, method: str, tokens: Callable[[Any], int]) -> None:
        of: Any = getattr(sys.modules[module], owner, None)
        make = getattr(of, method, None)
        if make is None:
            return

        def made(engine: Any, *args: Any, **options: Any) -> Any:
            told = make(engine, *args, **options)
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                self._tokens = tokens(engine)
            return told

        setattr(of, method, made)

    def told(self, *, failed: bool) -> dict[str, Any]:
        phases = installation.sleep_phases
        phases.end(None)
        cuda: Any = sys.modules["torch"].cuda if "torch" in sys.modules else None
        knows_pinned = cuda is not None and cuda.is_initialized() and hasattr(cuda, "host_memory_stats")
        return {
            "graph_bytes": sum(self._pools.values()),
            "num_graphs": self._num_graphs,
            "tokens": self._tokens,
            "pinned_bytes": cuda.host_memory_stats().get("allocated_bytes.peak", 0) if knows_pinned else 0,
            "sleep": phases.told(failed=failed),
        }


def _reserved_by(pool: Any) -> int:
    snapshot = sys.modules["torch"].cuda.memory_snapshot
    try:
        segments = snapshot(pool, include_traces=False)
    except TypeError:  # before torch 2.11
        segments = [one for one in snapshot() if tuple(one.get("segment_pool_id", ())) == tuple(pool)]
    return sum(one["total_size"] for one in segments)


@dataclass
class Phase:
    """From a sleep or a wake to the next; bytes of the device that holds most."""

    begins: str  #: "start", or as in "sleep kv"
    asleep: dict[str, int]  #: bytes that are not on the device, by tag
    num_times: int = 0
    allocated_peak_bytes: int | None = None  #: without what sleeps; None where the allocator keeps no peak of a phase
    held_peak_bytes: int = 0  #: of all that the device gave, to whomever


@dataclass(frozen=True)
class RanOut:
    phase: str  #: how the phase began
    waking: str | None  #: the tags that were to wake; None: it was a request
    at: str  #: the line of the program
    wanted_bytes: int
    free_bytes: int  #: on the device
    could_sleep: dict[str, int]  #: what would go back to the device, by each tag that is awake
    cached_bytes: int = 0  #: what PyTorch's own allocator holds and does not use


class SleepPhases:
    def __init__(self) -> None:
        self._now = Phase("start", {}, num_times=1)
        self._phases = [self._now]
        self._ran_out: RanOut | None = None

    def end(self, allocated_peak_bytes: int | None) -> None:
        """Something is about to sleep or to wake; with the peak of what was allocated and awake meanwhile."""
        now = self._now
        now.held_peak_bytes = max([now.held_peak_bytes, *map(virtual.peak_bytes, _devices())])
        if allocated_peak_bytes is not None:
            now.allocated_peak_bytes = max(now.allocated_peak_bytes or 0, allocated_peak_bytes)

    def begin(self, begins: str, asleep: dict[str, int]) -> None:
        """It does: `asleep` are the bytes that the device has back now, by tag."""
        alike = (one for one in self._phases if one.begins == begins and one.asleep.keys() == asleep.keys())
        now = self._now = next(alike, None) or Phase(begins, asleep)
        now.num_times += 1
        now.asleep = {name: max(size, now.asleep[name]) for name, size in asleep.items()}
        if now.num_times == 1:
            self._phases.append(now)
        _restart_peaks()

    def refused(self, **what: Any) -> None:
        """There was no memory for a request or to wake; `what`: the fields of `RanOut` without the phase."""
        self._ran_out = RanOut(phase=self._now.begins, **what)
        _restart_peaks()  # what a wake had mapped before it failed is not of the phase

    def told(self, *, failed: bool) -> dict[str, Any] | None:
        """As JSON has it, after a last `end`: the phases, and where a program that failed ran out; None without any."""
        ran_out = self._ran_out if failed else None
        if len(self._phases) == 1 and ran_out is None:
            return None
        return {
            "phases": [asdict(one) for one in self._phases],
            "ended_in": self._now.begins,
            "ran_out": asdict(ran_out) if ran_out is not None else None,
        }


def _devices() -> range:
    gpu = virtual.active_gpu()
    return range(gpu.num_devices if gpu is not None else 0)


def _restart_peaks() -> None:
    for device in _devices():
        virtual.restart_peak(device)


def _watch_vllm(phases: SleepPhases) -> None:
    owner: Any = getattr(sys.modules[_VLLM], "CuMemAllocator", None)
    sleep, wake_up = getattr(owner, "sleep", None), getattr(owner, "wake_up", None)
    if sleep is None or wake_up is None:
        return
    asleep: set[int] = set()  # addresses

    def slept(engine: Any, offload_tags: Any = None) -> Any:
        phases.end(None)
        told = sleep(engine, offload_tags)
        asleep.update(engine.pointer_to_data)
        kept = ", ".join([offload_tags] if isinstance(offload_tags, str) else offload_tags or ())
        phases.begin(f"sleep, {kept} kept" if kept else "sleep", _by_tag(engine, asleep))
        return told

    def woken(engine: Any, tags: Any = None) -> Any:
        found = engine.pointer_to_data
        waking = {address for address in asleep & found.keys() if tags is None or found[address].tag in tags}
        begins = f"wake {', '.join(tags or ())}".strip()
        phases.end(None)
        free_bytes, cached_bytes = sys.modules["torch"].cuda.mem_get_info()[0], _cached_bytes()
        try:
            told = wake_up(engine, tags)
        except RuntimeError:
            wanted = _by_tag(engine, waking)
            phases.refused(
                waking=", ".join(wanted),
                at=_line_of_program(),
                wanted_bytes=sum(wanted.values()),
                free_bytes=free_bytes,
                could_sleep={},
                cached_bytes=cached_bytes,
            )
            phases.begin(f"{begins}, in vain", _by_tag(engine, asleep))
            raise
        asleep.difference_update(waking)
        phases.begin(begins, _by_tag(engine, asleep))
        return told

    owner.sleep, owner.wake_up = slept, woken


def _by_tag(engine: Any, addresses: set[int]) -> dict[str, int]:
    """The bytes of what lives at these addresses, by tag; the second word of its handle is its size."""
    found: dict[str, int] = {}
    for address, data in engine.pointer_to_data.items():
        if address in addresses:
            found[data.tag] = found.get(data.tag, 0) + data.handle[1]
    return found


def _line_of_program() -> str:
    stack = traceback.walk_stack(sys._getframe(1))
    frames = [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
    return site_name([one for one in frames if f"{os.sep}vllm{os.sep}" not in one.filename])


def _cached_bytes() -> int:
    """What torch.cuda.empty_cache() would give back."""
    segments = sys.modules["torch"].cuda.memory_snapshot()
    common = [one for one in segments if tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(one["total_size"] for one in common if not one["active_size"])
