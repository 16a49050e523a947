"""What vLLM (0.6 to 0.24) and SGLang write of memory as they start, read from a log.

Contract: figures are those of the last start in the log, of its first rank; what the log does not say is None. `GB` of
these logs are GiB, as both engines divide by 2^30.
"""

import re
from dataclasses import dataclass, field

GIB = 1 << 30
_STARTS = re.compile(r"Initializing an? (?:V\d )?LLM engine|server_args=ServerArgs|Load weight begin")
_FIGURE = r"(-?\d+(?:\.\d+)?) ?Gi?B"
_NUMBER = r"(\d[\d,]*)"
#: what a field is called here, and the wordings of the engines' releases; the first that is found counts
_BYTES = {
    "total_bytes": (rf"total_gpu_memory[ =]\(?{_FIGURE}", rf"Free memory on device (?:\S+ )?\(-?[\d.]+/{_FIGURE}"),
    "free_at_start_bytes": (r"Free memory on device (?:\S+ )?\((-?\d+(?:\.\d+)?)/",),
    "weights_bytes": (
        rf"model weights take {_FIGURE}",
        rf"[Mm]odel (?:loading|weights) took {_FIGURE}",
        rf"[^-]weights memory: {_FIGURE}",
        rf"Load weight end\.[^\n]*mem usage={_FIGURE}",
    ),
    "non_torch_bytes": (rf"non[_-]torch(?:_memory takes |_memory=| forward increase memory: ){_FIGURE}",),
    "activation_bytes": (
        rf"activation peak memory takes {_FIGURE}",
        rf"torch peak memory increase: {_FIGURE}",
        rf"{_FIGURE} for peak activation",
    ),
    "cache_bytes": (
        rf"reserved for KV Cache is {_FIGURE}",
        rf"Available KV cache memory: {_FIGURE}",
        rf"kv_cache_size={_FIGURE}",
    ),
    "graphs_estimated_bytes": (rf"GiB \(actual\), {_FIGURE} \(estimated\)", rf"Estimated CUDA graph memory: {_FIGURE}"),
    "graphs_bytes": (
        rf"CUDA graph pool memory: {_FIGURE} \(actual",
        rf"[Gg]raph capturing finished in [^\n]* took {_FIGURE}",
    ),
    "free_before_weights_bytes": (rf"Load weight begin\. avail mem={_FIGURE}",),
    "free_after_weights_bytes": (rf"Load weight end\.[^\n]*avail mem={_FIGURE}",),
    "free_after_cache_bytes": (rf"Memory pool end\. avail mem={_FIGURE}",),
}
_COUNTS = {
    "tokens": (
        rf"GPU KV cache size: {_NUMBER} tokens",
        rf"[^\w]KV Cache is allocated\.[^\n]*#tokens: {_NUMBER}",
        rf"max_total_num_tokens={_NUMBER}",
    ),
    "num_blocks": (rf"# (?:GPU|CUDA) blocks: {_NUMBER}",),
    "length": (rf"Maximum concurrency for {_NUMBER} tokens per request", rf"context_len={_NUMBER}"),
    "num_ranks": (rf"tensor_parallel_size['\"]?[=:] ?{_NUMBER}", rf"\btp_size={_NUMBER}"),
    "num_sampled": (rf"warming up sampler with {_NUMBER} dummy requests",),
}
_RATIOS = {
    "share": (
        r"gpu_memory_utilization[ =]\(?(\d?\.\d+)",
        r"['\"]gpu_memory_utilization['\"]: (\d?\.\d+)",
        r"gpu-memory-utilization(?:=| from | )(\d?\.\d+)",
        r"mem_fraction_static=(\d?\.\d+)",
    ),
    "concurrency": (r"tokens per request: (\d[\d,]*\.?\d*)x",),
}
_V0_BLOCK_TOKENS = 16  # of vLLM's releases that count blocks


@dataclass(frozen=True, kw_only=True)
class ServerLog:
    """One start of a server."""

    engine: str
    """`vLLM` or `SGLang`."""
    release: str = ""
    num_ranks: int = 1
    share: float | None = None
    """gpu_memory_utilization of vLLM, mem_fraction_static of SGLang."""
    total_bytes: int | None = None
    free_at_start_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    activation_bytes: int | None = None
    cache_bytes: int | None = None
    """Bytes for the keys and values of all layers, on one rank."""
    tokens: int | None = None
    length: int | None = None
    """Tokens of the longest request."""
    concurrency: float | None = None
    """How many requests of that length fit, as the engine says."""
    graphs_estimated_bytes: int | None = None
    graphs_bytes: int | None = None
    free_before_weights_bytes: int | None = None
    free_after_weights_bytes: int | None = None
    free_after_cache_bytes: int | None = None
    free_at_end_bytes: int | None = None
    num_sampled: int | None = None
    """Requests with which the sampler ran out of memory as it was warmed up."""
    reckons_graphs: bool = False
    """Whether the estimate of the graphs was taken from the cache."""
    released_meanwhile: bool = False
    """Whether vLLM saw more free memory after its measurement than before."""
    lines: dict[str, str] = field(default_factory=dict, repr=False)
    """The line of the log that each field is from."""

    @property
    def token_bytes(self) -> float | None:
        """Bytes of the cache for each token; None if the log does not tell."""
        return self.cache_bytes / self.tokens if self.cache_bytes and self.tokens and self.cache_bytes > 0 else None


def read_server_log(text: str) -> ServerLog | None:
    """The last start of a server in a log; None if it is of neither vLLM nor SGLang."""
    starts = [match.start() for match in _STARTS.finditer(text)]
    begin = text.rfind("\n", 0, _first_of_last(text, starts)) + 1 if starts else 0
    told = text[begin:]
    lines: dict[str, str] = {}

    def find(name: str, wordings: tuple[str, ...], where: str) -> str | None:
        for wording in wordings:
            if (match := re.search(wording, where)) is not None:
                lines.setdefault(name, _line_at(where, match.start(1)))
                return match[1]
        return None

    sizes = {name: _as_bytes(found) for name, one in _BYTES.items() if (found := find(name, one, told)) is not None}
    counts = {
        name: int(found.replace(",", ""))
        for name, one in _COUNTS.items()
        if (found := find(name, one, told)) is not None
    }
    # settings are written before the engine says that it starts
    ratios = {
        name: float(found.replace(",", ""))
        for name, one in _RATIOS.items()
        if (found := find(name, one, told) or find(name, one, text)) is not None
    }
    blocks = counts.pop("num_blocks", None)
    if blocks is not None and "tokens" not in counts:
        counts["tokens"] = blocks * _V0_BLOCK_TOKENS
    is_sglang = bool(re.search(r"Load weight begin|KV Cache is allocated|server_args=ServerArgs", told))
    if is_sglang:
        for name, (size, line) in _of_sglang(told).items():
            sizes.setdefault(name, size)
            lines.setdefault(name, line)
    if not {"cache_bytes", "tokens", "weights_bytes", "num_sampled"} & (sizes.keys() | counts.keys()):
        return None
    meanwhile = find("released_meanwhile", (r"(Error in memory profiling)",), told)
    release = re.search(r"LLM engine \(v([\w.+]+)\)|vLLM API server version ([\w.+]+)", text)
    return ServerLog(
        engine="SGLang" if is_sglang else "vLLM",
        release=next(filter(None, release.groups()), "") if release else "",
        reckons_graphs="CUDA graph memory profiling is enabled" in told,
        released_meanwhile=meanwhile is not None,
        lines=lines,
        **sizes,
        **counts,
        **ratios,  # type: ignore[arg-type]
    )


def _line_at(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].split("\n", 1)[0].strip()


def _of_sglang(told: str) -> dict[str, tuple[int, str]]:
    """What SGLang spreads over several figures, or lines, with the first of them."""
    found: dict[str, tuple[int, str]] = {}
    parts = re.search(rf"[^\w]KV Cache is allocated\.[^\n]*K size: {_FIGURE}, V size: {_FIGURE}", told)
    whole = re.search(rf"[^\w]KV Cache is allocated\.[^\n]*KV size: {_FIGURE}", told)
    if (match := parts or whole) is not None:
        found["cache_bytes"] = sum(_as_bytes(figure) for figure in match.groups()), _line_at(told, match.start(1))
    captures: dict[str, str] = {}  # of each kind of graphs (decode, piecewise, draft), by the first rank that tells
    for match in re.finditer(r"\bCapture ([^.\n]*)graph end\.", told):
        captures.setdefault(match[1].lower(), _line_at(told, match.start()))
    for line in captures.values():
        if (used := re.search(rf"mem usage={_FIGURE}", line)) is not None:
            before, first = found.get("graphs_bytes", (0, line))
            found["graphs_bytes"] = before + _as_bytes(used[1]), first
        if (free := re.search(rf"avail mem={_FIGURE}", line)) is not None:
            found["free_at_end_bytes"] = _as_bytes(free[1]), line
    return found


def _first_of_last(text: str, starts: list[int]) -> int:
    """Where the last start begins: the first of its lines from several ranks, or in two wordings."""
    last = starts[-1]
    for start in reversed(starts):
        if "Available KV cache memory" in text[start:last] or "KV Cache is allocated" in text[start:last]:
            break
        last = start
    return last


def _as_bytes(figure: str) -> int:
    return round(float(figure) * GIB)
