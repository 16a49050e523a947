"""The threads that read and write files, with a pinned buffer each.

Contract: optimizers whose state lies on disk may share them, since each step waits for its own copies.
"""

import queue

import torch

from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.techniques.device_threads import threads_at
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.parts import DISK_THREADS, PAGE_BYTES, disk_buffers_bytes, disk_chunk_bytes


class DiskThreads:
    """Threads for files, with `buffers` of `chunk_bytes` that begin at a page; whoever takes one puts it back."""

    def __init__(self, host: HostStore, device: torch.device) -> None:
        """Raises BadInputError if `host` has no room for buffers."""
        self.chunk_bytes = disk_chunk_bytes(host.limit_bytes)
        size_bytes = disk_buffers_bytes(self.chunk_bytes)
        block = host.take(size_bytes, pinned=device.type == "cuda") if self.chunk_bytes else None
        if block is None:
            raise BadInputError(
                f"state on disk needs {human_bytes(2 * DISK_THREADS * PAGE_BYTES)} of host memory for its buffers: "
                "allow as much."
            )
        begin = -block.data_ptr() % PAGE_BYTES
        self.buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for number in range(DISK_THREADS):
            self.buffers.put(block[begin + number * self.chunk_bytes :][: self.chunk_bytes])
        self.pool = threads_at(device, DISK_THREADS, "stalloc-disk")
