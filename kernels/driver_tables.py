"""Device memory for the tables of launches straight from the driver, for callers that serve torch's allocations.

Contract: nothing is taken from torch's or CuPy's allocator. What an upload returns is valid until `begin`; a thread
uses tables of its own. They live as long as the process, and grow to what the largest launch needed.
"""

import numpy as np


class Tables:
    """Buffers on the current device of CuPy's runtime."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, int]] = []  # address, bytes
        self._next = 0

    def begin(self) -> None:
        """The tables of the launches before are needed no longer."""
        self._next = 0

    def upload(self, table: np.ndarray) -> int:
        """The address of a copy of a table, which is complete when this returns."""
        from cupy.cuda import runtime

        if self._next == len(self._buffers):
            self._buffers.append((0, 0))
        address, room = self._buffers[self._next]
        if room < table.nbytes:
            runtime.free(address)
            self._buffers[self._next] = (0, 0)
            room = 1 << max(16, (table.nbytes - 1).bit_length())
            address = runtime.malloc(room)
            self._buffers[self._next] = (address, room)
        self._next += 1
        # from pageable memory a copy may return before the device has it all, and other streams do not wait for it
        runtime.memcpyAsync(address, table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice, 0)
        runtime.streamSynchronize(0)
        return int(address)

    def download(self, address: int, table: np.ndarray) -> None:
        """Copy an uploaded table back, once torch's current stream is done."""
        import torch
        from cupy.cuda import runtime

        torch.cuda.current_stream().synchronize()
        runtime.memcpy(table.ctypes.data, address, table.nbytes, runtime.memcpyDeviceToHost)
