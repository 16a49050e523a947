"""Which of a program's requests are cuDNN's workspaces, on a real GPU as on the virtual one.

Contract: after `SeenConvolutions(torch)` each convolution that cuDNN runs, forward and backward, is noted with the
numbers of the requests that it made; no request is added. `work_spaces` finds them in a history that was recorded from
the first request on: what was asked for right after a result, before the next one, is its workspace.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.device.followed import below
from stalloc.trace import Action, Trace


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution, or the gradient of one, as cuDNN is told of it."""

    direction: str  #: forward, data or filter
    input_sizes: tuple[int, ...]
    filter_sizes: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    channels_last: bool


@dataclass(frozen=True)
class _Call:
    """A result of a convolution: where it and those beside it lie, and which requests were made for them."""

    address: int
    results: frozenset[int]
    requests: slice


class SeenConvolutions:
    """The convolutions of this process since this was made, the latest call of each."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._calls: dict[int, dict[Convolution, _Call]] = {}
        self._library = torch.library.Library("aten", "IMPL")
        self._go_on = below(torch)
        for name, note in (
            ("cudnn_convolution", self._forward),
            ("cudnn_convolution_transpose", self._transposed),
            ("convolution_backward", self._backward),
        ):
            self._library.impl(name, self._noted(getattr(torch.ops.aten, name).default, note), "BackendSelect")

    def _noted(self, operator: Any, note: Callable[..., list[tuple[Any, Any]]]) -> Callable[..., Any]:
        def run(first: Any, *args: Any) -> Any:
            if not first.is_cuda:
                return self._go_on(operator, first, *args)
            before = self._num_requests(first.device.index)
            result = self._go_on(operator, first, *args)
            after = self._num_requests(first.device.index)
            parts = result if isinstance(result, tuple) else (result,)
            results = frozenset(one.data_ptr() for one in parts if one is not None)
            calls = self._calls.setdefault(first.device.index, {})
            for tensor, convolution in note(result, first, *args):
                if convolution is not None:
                    calls[convolution] = _Call(tensor.data_ptr(), results, slice(before, after))
            return result

        return run

    def _num_requests(self, device: int) -> int:
        return int(self._torch._C._cuda_memoryStats(device)["allocation"]["all"]["allocated"])

    def _convolution(
        self, direction: str, sizes: Any, filters: Any, strides: Any, *operands: Any
    ) -> Convolution | None:
        """None where PyTorch copies an operand to another layout first: that would pass for a workspace."""
        torch = self._torch
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(filters.dim(), torch.contiguous_format)
        all_operands = (*operands, filters)
        is_last = layout != torch.contiguous_format and any(
            one.is_contiguous(memory_format=layout) and not one.is_contiguous() for one in all_operands
        )
        wanted = layout if is_last else torch.contiguous_format
        if not all(one.is_contiguous(memory_format=wanted) for one in all_operands):
            return None
        return Convolution(
            direction=direction,
            input_sizes=tuple(sizes.shape),
            filter_sizes=tuple(filters.shape),
            strides=tuple(strides),
            element_bytes=filters.element_size(),
            channels_last=is_last,
        )

    def _forward(self, result: Any, image: Any, filters: Any, padding: Any, stride: Any, *_: Any) -> Any:
        return [(result, self._convolution("forward", image, filters, stride, image))]

    def _transposed(self, result: Any, image: Any, filters: Any, padding: Any, more: Any, stride: Any, *_: Any) -> Any:
        return [(result, self._convolution("data", result, filters, stride, image))]

    def _backward(self, result: Any, outer: Any, image: Any, filters: Any, biases: Any, stride: Any, *rest: Any) -> Any:
        transposed, mask = rest[2], rest[-1]
        if "Cudnn" not in str(self._torch._C._select_conv_backend(image, filters, None, stride, *rest[:5])):
            return []
        # what a transposed convolution takes is what the other gives
        sizes, towards = (outer, "forward") if transposed else (image, "data")
        found = []
        if mask[0]:
            found.append((result[0], self._convolution(towards, sizes, filters, stride, image, outer)))
        if mask[1]:
            found.append((result[1], self._convolution("filter", sizes, filters, stride, image, outer)))
        return found

    def work_spaces(self, trace: Trace) -> list[tuple[Convolution, int]]:
        """The bytes that each of a device's convolutions asked for; none if the trace lacks some requests."""
        events = np.flatnonzero(trace.action == Action.ALLOC)
        if len(events) != self._num_requests(trace.device):
            return []
        found = []
        for convolution, call in self._calls.get(trace.device, {}).items():
            made = events[call.requests]
            # the last request at an address is the result that is still there; a workspace may have been there before
            last = {int(address): number for number, address in enumerate(trace.address[made])}
            if call.address not in last:
                continue  # the result is a view of something else
            begins = [*sorted(last[address] for address in call.results if address in last), len(made)]
            number = last[call.address]
            between = made[number + 1 : begins[begins.index(number) + 1]]
            found.append((convolution, int(trace.event_size[between[-1]]) if len(between) else 0))
        return found
