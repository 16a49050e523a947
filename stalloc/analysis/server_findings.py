"""Which lines of a server's log are not what its settings predict, and why.

Contract: a finding quotes its line. Figures of logs are rounded to 0.01 GiB, and what follows from several of them is
held against them only where it differs by more than the rounding can explain.
"""

from dataclasses import dataclass

from stalloc.analysis.server_log import GIB, ServerLog
from stalloc.figures import human_bytes

_ROUNDED_BYTES = GIB // 200  # half a unit of the last digit
_SUM_BYTES = 5 * _ROUNDED_BYTES  # of what is made of five figures
_WORTH_TELLING = 0.01  # of the cache
#: The least and most of memory that is not PyTorch's, in sixteen public logs of vLLM on one card (docs/serving.md).
DRIVER_GROWTH_BYTES = (round(0.01 * GIB), round(0.46 * GIB))
#: The most that a card is short of when an engine starts on it, for its own context: see device/known_gpus.py.
_OWN_AT_START_BYTES, _OWN_OF_RANKS_BYTES = round(0.8 * GIB), round(1.3 * GIB)
_SHORTER = 1.05  # requests that fit, over those of whole length: more is no rounding to blocks


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about the memory of a server that its settings do not predict."""

    cause: str
    """`another process`, `graph estimate`, `sampler`, `settings`, `layers`, `not accounted for`."""
    line: str
    """As the log has it; empty where no single line says it."""
    text: str


def findings(log: ServerLog) -> list[Finding]:
    """All findings about one start, the most important first."""
    found = [_occupied(log), _released(log), _outside(log), _budget(log), _graphs(log), _sampler(log), _requests(log)]
    found += [_loading(log), _fraction(log)]
    return [one for one in found if one is not None]


def _tokens_of(log: ServerLog, num_bytes: int) -> str:
    """Words for the tokens that so many bytes of the cache would hold."""
    return f", {num_bytes / log.token_bytes:,.0f} tokens" if log.token_bytes else ""


def _occupied(log: ServerLog) -> Finding | None:
    total, free = log.total_bytes, log.free_at_start_bytes
    if total is None or free is None:
        return None
    own = _OWN_AT_START_BYTES if log.num_ranks == 1 else _OWN_OF_RANKS_BYTES
    if total - free <= own:
        return None
    text = (
        f"{human_bytes(total - free)} of {human_bytes(total)} were in use before it began, and a context takes at most "
        f"{human_bytes(own)}: another process has the rest; nvidia-smi names it"
    )
    return Finding(cause="another process", line=log.lines["free_at_start_bytes"], text=text)


def _released(log: ServerLog) -> Finding | None:
    if not log.released_meanwhile:
        return None
    text = "more was free after the measurement than before: another process gave memory back meanwhile; start it again"
    return Finding(cause="another process", line=log.lines.get("released_meanwhile", ""), text=text)


def _outside(log: ServerLog) -> Finding | None:
    most, outside = DRIVER_GROWTH_BYTES[1], log.non_torch_bytes
    if outside is None or outside <= most + _ROUNDED_BYTES or log.num_ranks > 1:
        return None
    taken = outside - most
    text = (
        f"{human_bytes(outside)} came to be used outside of PyTorch while it measured, where one card alone has at "
        f"most {human_bytes(most)}: another process took {human_bytes(taken)} or more{_tokens_of(log, taken)}"
    )
    return Finding(cause="another process", line=log.lines["non_torch_bytes"], text=text)


def _budget(log: ServerLog) -> Finding | None:
    """Findings about vLLM's cache, which is a share of the card minus what was measured."""
    if log.engine != "vLLM" or log.cache_bytes is None or log.share is None:
        return None
    line, cache = log.lines["cache_bytes"], log.cache_bytes
    total = log.total_bytes
    if cache < 0:
        budget = f" is {human_bytes(round(total * log.share))}, which" if total is not None else ""
        text = f"gpu_memory_utilization {log.share:g} is a share of the whole card, weights included:{budget} must be "
        return Finding(cause="settings", line=line, text=f"{text}{human_bytes(-cache)} more before there is a cache")
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
    return Finding(cause="not accounted for", line=line, text=text)


def _graphs(log: ServerLog) -> Finding | None:
    estimate, actual = log.graphs_estimated_bytes, log.graphs_bytes
    if estimate is None or actual is None or log.cache_bytes is None or log.cache_bytes <= 0:
        return None
    over = estimate - actual
    if abs(over) <= max(2 * _ROUNDED_BYTES, _WORTH_TELLING * log.cache_bytes):
        return None
    line = log.lines["graphs_estimated_bytes"]
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
    return Finding(cause="graph estimate", line=line, text=text)


def _sampler(log: ServerLog) -> Finding | None:
    if log.num_sampled is None:
        return None
    text = (
        f"the sampler is warmed up after the cache is made, with {log.num_sampled:,} requests, and sorts 4 bytes for "
        "each of them and word of the vocabulary several times: lower max_num_seqs, or gpu_memory_utilization"
    )
    return Finding(cause="sampler", line=log.lines["num_sampled"], text=text)


def _requests(log: ServerLog) -> Finding | None:
    if log.engine != "vLLM" or None in (log.tokens, log.length, log.concurrency) or not log.length:
        return None
    whole = (log.tokens or 0) / log.length
    told = log.concurrency or 0.0
    if not whole or told <= whole * _SHORTER:
        return None
    text = (
        f"{whole:.2f} requests of {log.length:,} tokens would fit by the tokens, and {told:.2f} do: some layers keep "
        "less than every token of a request (a sliding window, a state)"
    )
    return Finding(cause="layers", line=log.lines["concurrency"], text=text)


def _loading(log: ServerLog) -> Finding | None:
    before, after, weights = log.free_before_weights_bytes, log.free_after_weights_bytes, log.weights_bytes
    if before is None or after is None or weights is None:
        return None
    other = before - after - weights
    if abs(other) <= 3 * _ROUNDED_BYTES:
        return None
    who = "another process took" if other > 0 else "another process gave back"
    text = f"{human_bytes(before - after)} less were free after the weights, which are {human_bytes(weights)}: {who} "
    return Finding(
        cause="another process", line=log.lines["free_after_weights_bytes"], text=text + human_bytes(abs(other))
    )


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
    return Finding(cause="not accounted for", line=log.lines["cache_bytes"], text=text)
