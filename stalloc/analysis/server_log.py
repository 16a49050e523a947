"""What vLLM (0.6 to 0.24) and SGLang write of memory as they start, and what of it their settings do not predict.

Contract: figures are those of the last start in the log, of its first rank; what the log does not say is None. `GB` of
these logs are GiB, as both engines divide by 2^30. A finding quotes its line. Figures of logs are rounded to 0.01 GiB,
and what follows from several of them is held against them only where it differs by more than that can explain.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from stalloc.figures import human_bytes

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
    engine: str  #: `vLLM` or `SGLang`
    release: str = ""
    num_ranks: int = 1
    share: float | None = None  #: gpu_memory_utilization of vLLM, mem_fraction_static of SGLang
    total_bytes: int | None = None
    free_at_start_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    activation_bytes: int | None = None
    cache_bytes: int | None = None  #: bytes for the keys and values of all layers, on one rank
    tokens: int | None = None
    length: int | None = None  #: tokens of the longest request
    concurrency: float | None = None  #: how many requests of that length fit, as the engine says
    graphs_estimated_bytes: int | None = None
    graphs_bytes: int | None = None
    free_before_weights_bytes: int | None = None
    free_after_weights_bytes: int | None = None
    free_after_cache_bytes: int | None = None
    free_at_end_bytes: int | None = None
    num_sampled: int | None = None  #: requests with which the sampler ran out of memory as it was warmed up
    reckons_graphs: bool = False  #: whether the estimate of the graphs was taken from the cache
    released_meanwhile: bool = False  #: whether vLLM saw more free memory after its measurement than before
    lines: dict[str, str] = field(default_factory=dict, repr=False)  #: the line of the log that each field is from

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

    values: dict[str, Any] = {}
    # settings are written before the engine says that it starts
    for fields, convert, places in (
        (_BYTES, _as_bytes, (told,)),
        (_COUNTS, lambda found: int(found.replace(",", "")), (told,)),
        (_RATIOS, lambda found: float(found.replace(",", "")), (told, text)),
    ):
        for name, wordings in fields.items():
            if found := next(filter(None, (find(name, wordings, place) for place in places)), None):
                values[name] = convert(found)
    blocks = values.pop("num_blocks", None)
    if blocks is not None:
        values.setdefault("tokens", blocks * _V0_BLOCK_TOKENS)
    is_sglang = bool(re.search(r"Load weight begin|KV Cache is allocated|server_args=ServerArgs", told))
    if is_sglang:
        for name, (size, line) in _of_sglang(told).items():
            values.setdefault(name, size)
            lines.setdefault(name, line)
    if not {"cache_bytes", "tokens", "weights_bytes", "num_sampled"} & values.keys():
        return None
    release = re.search(r"LLM engine \(v([\w.+]+)\)|vLLM API server version ([\w.+]+)", text)
    return ServerLog(
        engine="SGLang" if is_sglang else "vLLM",
        release=next(filter(None, release.groups()), "") if release else "",
        reckons_graphs="CUDA graph memory profiling is enabled" in told,
        released_meanwhile=find("released_meanwhile", (r"(Error in memory profiling)",), told) is not None,
        lines=lines,
        **values,
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


_ROUNDED_BYTES = GIB // 200  # half a unit of the last digit
_SUM_BYTES = 5 * _ROUNDED_BYTES  # of what is made of five figures
_WORTH_TELLING = 0.01  # of the cache
#: The least and most of memory that is not PyTorch's, in sixteen public logs of vLLM on one card (docs/serving.md).
DRIVER_GROWTH_BYTES = (round(0.01 * GIB), round(0.46 * GIB))
#: The most that a card is short of when an engine starts on it, for its own context: see device/known_gpus.py.
_OWN_AT_START_BYTES, _OWN_OF_RANKS_BYTES = round(0.8 * GIB), round(1.3 * GIB)
_SHORTER = 1.05  # requests that fit, over those of whole length: more is no rounding to blocks


@dataclass(frozen=True)
class Finding:
    """Something about the memory of a server that its settings do not predict."""

    cause: str  #: `another process`, `graph estimate`, `sampler`, `settings`, `layers`, `not accounted for`
    line: str  #: as the log has it; empty where no single line says it
    text: str


def findings(log: ServerLog) -> list[Finding]:
    """All findings about one start, the most important first."""
    rules = (_occupied, _released, _outside, _budget, _graphs, _sampler, _requests, _loading, _fraction)
    return [found for rule in rules if (found := rule(log)) is not None]


def _tokens_of(log: ServerLog, num_bytes: int) -> str:
    return f", {num_bytes / log.token_bytes:,.0f} tokens" if log.token_bytes else ""


def _occupied(log: ServerLog) -> Finding | None:
    total, free = log.total_bytes, log.free_at_start_bytes
    own = _OWN_AT_START_BYTES if log.num_ranks == 1 else _OWN_OF_RANKS_BYTES
    if total is None or free is None or total - free <= own:
        return None
    return Finding(
        "another process",
        log.lines["free_at_start_bytes"],
        f"{human_bytes(total - free)} of {human_bytes(total)} were in use before it began, and a context takes at most "
        f"{human_bytes(own)}: another process has the rest; nvidia-smi names it",
    )


def _released(log: ServerLog) -> Finding | None:
    if not log.released_meanwhile:
        return None
    text = "more was free after the measurement than before: another process gave memory back meanwhile; start it again"
    return Finding("another process", log.lines.get("released_meanwhile", ""), text)


def _outside(log: ServerLog) -> Finding | None:
    most, outside = DRIVER_GROWTH_BYTES[1], log.non_torch_bytes
    if outside is None or outside <= most + _ROUNDED_BYTES or log.num_ranks > 1:
        return None
    taken = outside - most
    text = (
        f"{human_bytes(outside)} came to be used outside of PyTorch while it measured, where one card alone has at "
        f"most {human_bytes(most)}: another process took {human_bytes(taken)} or more{_tokens_of(log, taken)}"
    )
    return Finding("another process", log.lines["non_torch_bytes"], text)


def _budget(log: ServerLog) -> Finding | None:
    """Findings about vLLM's cache, which is a share of the card minus what was measured."""
    if log.engine != "vLLM" or log.cache_bytes is None or log.share is None:
        return None
    line, cache, total = log.lines["cache_bytes"], log.cache_bytes, log.total_bytes
    if cache < 0:
        budget = f" is {human_bytes(round(total * log.share))}, which" if total is not None else ""
        text = f"gpu_memory_utilization {log.share:g} is a share of the whole card, weights included:{budget} must be "
        return Finding("settings", line, f"{text}{human_bytes(-cache)} more before there is a cache")
    known = (log.weights_bytes, log.activation_bytes, log.non_torch_bytes)
    if total is None or None in known:
        return None
    reckoned = (log.graphs_estimated_bytes or 0) if log.reckons_graphs else 0
    missing = round(total * log.share) - sum(one or 0 for one in known) - reckoned - cache
    if abs(missing) <= _SUM_BYTES + 0.005 * total:  # the share is rounded to a hundredth too
        return None
    how = "less" if missing > 0 else "more"
    text = (
        f"{human_bytes(abs(missing))} {how} than {log.share:g} of {human_bytes(total)} after weights, activations and "
        f"what is outside of PyTorch{_tokens_of(log, abs(missing))}: a fixed size of the cache, or a part of it that "
        "has a line of its own"
    )
    return Finding("not accounted for", line, text)


def _graphs(log: ServerLog) -> Finding | None:
    estimate, actual = log.graphs_estimated_bytes, log.graphs_bytes
    if estimate is None or actual is None or log.cache_bytes is None or log.cache_bytes <= 0:
        return None
    if abs(over := estimate - actual) <= max(2 * _ROUNDED_BYTES, _WORTH_TELLING * log.cache_bytes):
        return None
    told = f"CUDA graphs were taken to need {human_bytes(estimate)} and take {human_bytes(actual)}"
    if over > 0 and log.reckons_graphs:
        text = (
            f"{told}: {human_bytes(over)} of the cache are lost{_tokens_of(log, over)}; "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 leaves the estimate out"
        )
    elif over > 0:
        text = f"{told}; the estimate was not taken from the cache"
    else:
        text = f"{told}: {human_bytes(-over)} come out of what gpu_memory_utilization leaves free"
    return Finding("graph estimate", log.lines["graphs_estimated_bytes"], text)


def _sampler(log: ServerLog) -> Finding | None:
    if log.num_sampled is None:
        return None
    text = (
        f"the sampler is warmed up after the cache is made, with {log.num_sampled:,} requests, and sorts 4 bytes for "
        "each of them and word of the vocabulary several times: lower max_num_seqs, or gpu_memory_utilization"
    )
    return Finding("sampler", log.lines["num_sampled"], text)


def _requests(log: ServerLog) -> Finding | None:
    if log.engine != "vLLM" or not log.tokens or not log.length or log.concurrency is None:
        return None
    whole, told = log.tokens / log.length, log.concurrency
    if told <= whole * _SHORTER:
        return None
    text = (
        f"{whole:.2f} requests of {log.length:,} tokens would fit by the tokens, and {told:.2f} do: some layers keep "
        "less than every token of a request (a sliding window, a state)"
    )
    return Finding("layers", log.lines["concurrency"], text)


def _loading(log: ServerLog) -> Finding | None:
    before, after, weights = log.free_before_weights_bytes, log.free_after_weights_bytes, log.weights_bytes
    if before is None or after is None or weights is None:
        return None
    if abs(other := before - after - weights) <= 3 * _ROUNDED_BYTES:
        return None
    who = "another process took" if other > 0 else "another process gave back"
    text = f"{human_bytes(before - after)} less were free after the weights, which are {human_bytes(weights)}: {who} "
    return Finding("another process", log.lines["free_after_weights_bytes"], text + human_bytes(abs(other)))


def _fraction(log: ServerLog) -> Finding | None:
    """Findings about SGLang's cache, which is a share of the memory free at first, minus the weights."""
    before, after = log.free_before_weights_bytes, log.free_after_weights_bytes
    if log.engine != "SGLang" or log.share is None or log.cache_bytes is None or before is None or after is None:
        return None
    predicted = after - round(before * (1 - log.share))
    if abs(predicted - log.cache_bytes) <= max(0.03 * abs(predicted), 5 * _ROUNDED_BYTES):
        return None
    text = (
        f"mem_fraction_static {log.share:g} leaves {human_bytes(predicted)} for the cache and it is "
        f"{human_bytes(log.cache_bytes)}: a limit of its own (--max-total-tokens), another pool beside it (a draft "
        "model, a state), or another process"
    )
    return Finding("not accounted for", log.lines["cache_bytes"], text)
