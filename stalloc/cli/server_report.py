"""`stalloc explain` of a log of an inference server: its memory as told, and what its settings do not predict."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.text import Text

from stalloc.analysis.server_log import ServerLog, findings
from stalloc.cli.output import file_label
from stalloc.cli.tables import print_items, print_prose
from stalloc.figures import human_bytes
from stalloc.printable import printable

_SHOWN_OF_LINE = 200
_SHARES = {"vLLM": "gpu_memory_utilization", "SGLang": "mem_fraction_static"}


def server_entry(file: str, log: ServerLog) -> dict[str, Any]:
    """What JSON says of one start."""
    told = {name: value for name, value in dataclasses.asdict(log).items() if name != "lines"}
    return {"file": file, **told, "findings": [dataclasses.asdict(one) for one in findings(log)]}


def print_server(console: Console, file: str, log: ServerLog) -> None:
    """Print the memory of one start of a server, and what its settings do not predict."""
    parts = [f"{log.engine} {log.release}".rstrip()]
    if log.num_ranks > 1:
        parts.append(f"one of {log.num_ranks} ranks")
    if log.share is not None:
        card = f" of {human_bytes(log.total_bytes)}" if log.total_bytes is not None else ""
        parts.append(f"{_SHARES[log.engine]} {log.share:g}{card}")
    print_prose(console, Text.assemble((file_label(file), "bold"), ": " + ", ".join(parts)))
    rows = [
        ("weights", log.weights_bytes, ""),
        ("activation peak", log.activation_bytes, "of the measurement, above the weights"),
        (
            "outside of PyTorch",
            log.non_torch_bytes,
            "what came to be used meanwhile: the driver, NCCL, other processes",
        ),
        ("CUDA graphs, estimated", log.graphs_estimated_bytes, _estimate_is(log)),
        ("cache", log.cache_bytes, _cache_is(log)),
        ("CUDA graphs", log.graphs_bytes, "with what the driver takes for them"),
        ("free at the end", log.free_at_end_bytes, ""),
    ]
    print_items(console, [(name, human_bytes(size), meaning) for name, size, meaning in rows if size is not None])
    found = findings(log)
    if not found:
        print_prose(console, "No line of it differs from what its settings and its other lines predict.", indent="  ")
    for one in found:
        print_prose(console, Text.assemble((one.cause, "bold"), f": {one.text}"), indent="  ")
        if one.line:
            print_prose(console, printable(one.line, _SHOWN_OF_LINE), indent="    ")
    console.print()
    console.print("Next: stalloc dryrun --serve SCRIPT    (the same without a GPU, with other settings)")


def _estimate_is(log: ServerLog) -> str:
    return "taken from the cache" if log.reckons_graphs else ""


def _cache_is(log: ServerLog) -> str:
    if log.tokens is None:
        return ""
    each = f", {log.token_bytes / 1024:.1f} KiB each" if log.token_bytes else ""
    fits = ""
    if log.concurrency is not None and log.length:
        fits = f"; {log.concurrency:g} requests of {log.length:,} tokens"
    return f"{log.tokens:,} tokens{each}{fits}"
