"""Calls of operations with the time that their kernels took, of a trace of torch.profiler with shapes.

Contract: a kernel belongs to the outermost operation with a kernel of its own that launched it; copies from and to the
host belong to none. Importing this needs torch.
"""

import ast
import bisect
import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pricing.calibration import TimedCall
from stalloc.cost.call_work import work_or_nothing
from stalloc.cost.class_seconds import blocks_of, work_seconds
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import class_of_call, shapes_of
from stalloc.cost.step_seconds import first_number
from stalloc.integrations.operation_recording import facts_of
from stalloc.trace.operations import RangeKind

_NUMBERS = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64"}
_NUMBERS |= {"long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "bool": "bool"}
_NUMBERS |= {"unsigned char": "uint8", "signed char": "int8"}
_HALF = ("bfloat16", "float16")
_KERNELS, _LAUNCHES = ("kernel", "gpu_memset", "gpu_memcpy"), ("cuda_runtime", "cuda_driver")


@dataclass
class _Span:
    event: dict[str, Any]
    parent: "_Span | None"
    outermost: "_Span | None"  #: with a kernel

    @property
    def begin(self) -> float:
        return self.event["ts"]

    @property
    def end(self) -> float:
        return self.event["ts"] + self.event["dur"]


def timed_calls(path: Path, rates: GpuRates) -> list[TimedCall]:
    """The calls of a trace, in their order; those whose operation nobody knows are left out."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    threads = _spans([event for event in events if event.get("cat") == "cpu_op"])
    spans = [span for thread in threads.values() for span in thread]
    by_id = {span.event["args"].get("External id"): span for span in spans}
    launches = {event["args"].get("correlation"): event for event in events if event.get("cat") in _LAUNCHES}
    seconds: dict[int, float] = defaultdict(float)
    for kernel in events:
        if kernel.get("cat") not in _KERNELS or ("emcpy" in kernel["cat"] and "DtoD" not in kernel["name"]):
            continue
        launch = launches.get(kernel["args"].get("correlation"))
        span = by_id.get(kernel["args"].get("External id")) if launch is None else _around(threads, launch)
        span = span and (span.outermost or span)
        if span is not None:
            seconds[id(span)] += 1e-6 * kernel["dur"]
    usual = _usual_number(spans)
    found = [(span.begin, _timed(path, span, seconds[id(span)], usual, rates)) for span in spans if id(span) in seconds]
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


def _spans(events: list[dict[str, Any]]) -> dict[int, list[_Span]]:
    """By thread, in the order of their begin."""
    threads: dict[int, list[_Span]] = defaultdict(list)
    open_spans: dict[int, list[_Span]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = open_spans[event["tid"]]
        while stack and stack[-1].end <= event["ts"]:
            stack.pop()
        parent = stack[-1] if stack else None
        span = _Span(event, parent, parent.outermost if parent else None)
        if span.outermost is None and _has_kernel(event["name"]):
            span.outermost = span
        threads[event["tid"]].append(span)
        stack.append(span)
    return threads


def _has_kernel(name: str) -> bool:
    """Whether an operation is not made of others; old traces do not say of which overload it is."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if packet is None:
        return False
    facts = [facts_of(name, "" if overload == "default" else overload) for overload in packet.overloads()]
    return next((one.kind == RangeKind.OPERATION for one in facts if one is not None), False)


def _around(threads: dict[int, list[_Span]], launch: dict[str, Any]) -> _Span | None:
    """The innermost operation during which something was launched."""
    thread = threads.get(launch["tid"], [])
    place = bisect.bisect_right(thread, launch["ts"], key=lambda span: span.begin) - 1
    span = thread[place] if place >= 0 else None
    while span is not None and span.end < launch["ts"]:
        span = span.parent
    return span


def _usual_number(spans: list[_Span]) -> str:
    """The kind of number that most tensors of the program hold: lists of tensors do not say theirs."""
    told = Counter(
        _NUMBERS[kind]
        for span in spans
        for kind in span.event["args"].get("Input type", ())
        if _NUMBERS.get(kind) in (*_HALF, "float32")
    )
    return told.most_common(1)[0][0] if told else "float32"


def _timed(path: Path, span: _Span, seconds: float, usual: str, rates: GpuRates) -> TimedCall:
    args = span.event["args"]
    sizes = args.get("Input Dims", [])
    columns = (args.get(name) or [None] * len(sizes) for name in ("Input type", "Input Strides", "Concrete Inputs"))
    arguments = [_argument(*parts, usual) for parts in zip(sizes, *columns, strict=True)]
    call = [span.event["name"], "", arguments]
    work = work_or_nothing(call)
    kind, shapes = class_of_call(call), list(shapes_of(arguments))
    blocks, num_bytes = blocks_of(call[0], kind, shapes, rates), work.read_bytes + work.written_bytes
    took = work_seconds(work.flops, num_bytes, rates, half=first_number(arguments) in _HALF, blocks=blocks)
    return TimedCall(path.name.partition(".")[0], kind, json.dumps(call), seconds, took)


def _argument(sizes: Any, kind: Any, strides: Any, concrete: Any, usual: str) -> Any:
    """As stalloc.cost.calls has it."""
    if sizes and isinstance(sizes[0], list):
        steps = strides or [_dense(one) for one in sizes]
        return {"list": [{"tensor": [usual, *pair]} for pair in zip(sizes, steps, strict=True)]}
    if kind in _NUMBERS:
        return {"tensor": [_NUMBERS[kind], sizes, strides if strides is not None else _dense(sizes)]}
    if concrete in ("", None):
        return None
    try:
        value = ast.literal_eval(concrete)
    except (ValueError, SyntaxError):
        return concrete
    return 0.5 if isinstance(value, float) else value


def _dense(sizes: list[int]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(size, 1))
    return strides[::-1][: len(sizes)]
