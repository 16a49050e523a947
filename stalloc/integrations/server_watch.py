"""What an inference server takes beside its requests, and how many tokens the caches of known engines hold.

Contract: the program is not changed: functions of torch and of engines are called as before, and looked at after. What
an engine's release names otherwise is not known, and no error.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from stalloc.imports import after_import
from stalloc.integrations.installation import installation
from stalloc.integrations.sleep_phases import SleepPhases
from stalloc.integrations.vllm_sleep import watch_vllm


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
        """Look from here on, or from when the libraries are imported."""
        installation.sleep_phases = SleepPhases()
        watch_vllm(installation.sleep_phases)
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
        """What was seen of a program that is over, as JSON has it."""
        phases = installation.sleep_phases
        phases.end(None)
        torch: Any = sys.modules.get("torch")
        pinned: dict[str, int] = {}
        if torch is not None and torch.cuda.is_initialized() and hasattr(torch.cuda, "host_memory_stats"):
            pinned = torch.cuda.host_memory_stats()
        return {
            "graph_bytes": sum(self._pools.values()),
            "num_graphs": self._num_graphs,
            "tokens": self._tokens,
            "pinned_bytes": pinned.get("allocated_bytes.peak", 0),
            "sleep": phases.told(failed=failed),
        }


def _reserved_by(pool: Any) -> int:
    """Bytes that torch holds for a pool."""
    snapshot = sys.modules["torch"].cuda.memory_snapshot
    try:
        segments = snapshot(pool, include_traces=False)
    except TypeError:  # before torch 2.11
        segments = [one for one in snapshot() if tuple(one.get("segment_pool_id", ())) == tuple(pool)]
    return sum(one["total_size"] for one in segments)
