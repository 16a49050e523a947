"""Made-up lifespans of one pipeline stage that trains a transformer, on one GPU.

Contract: the same arguments give the same arrays; every allocation and every free has a clock tick of its own; sizes
are bytes rounded up to 512; a stage has at least the requests asked for, and at most one microbatch a step more.

A stage runs forward and backward passes of microbatches in the order of its schedule: one forward, one backward
(Narayanan et al., PipeDream, SOSP 2019; flushed every step) or interleaved chunks (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2). Every pass of a chunk
does the same, so one microbatch is written down event by event and the whole stage is that, shifted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]

KINDS = ("1f1b", "interleaved", "recompute", "moe", "varlen")
GRANULE = 512
#: experts that each token is sent to
EXPERTS_PER_TOKEN = 2
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """The part of a model on one GPU, and how its microbatches are run. Sizes are after tensor parallelism."""

    num_layers: int = 16  #: of the stage, in all its chunks
    hidden: int = 4096
    key_value: int = 1024  #: width of keys and of values
    feed_forward: int = 14336
    num_heads: int = 32
    tokens: int = 4096  #: of a microbatch, on average
    num_stages: int = 8
    stage: int = 0
    num_chunks: int = 1  #: more than one: interleaved
    recompute: bool = False  #: the backward pass runs each layer's forward pass again
    num_experts: int = 0  #: 0: a dense model; else each token goes to two of them, at random
    jitter: float = 0.0  #: the tokens of a microbatch differ by up to this factor, up or down
    shards: int = 8  #: the optimizer's state is divided among as many


MODELS = {
    "1f1b": Model(),
    "interleaved": Model(num_chunks=4),
    "recompute": Model(recompute=True),
    "moe": Model(num_experts=8, hidden=2048, feed_forward=5632, num_heads=16, jitter=0.1),
    "varlen": Model(jitter=0.5),
}


@dataclass(frozen=True, eq=False)
class Stage:
    """Lifespans [start, end) in events and sizes in bytes, each (n,), ordered by start."""

    name: str
    start: Column
    end: Column
    size: Column
    phase_edges: Column  #: events at which a pass of a microbatch, or the optimizer, begins
    num_steps: int
    num_microbatches: int


def make(kind: str, num_requests: int, *, num_steps: int = 10, seed: int = 0) -> Stage:
    """A stage of a kind out of KINDS with at least `num_requests` requests over `num_steps` steps.

    Raises ValueError if the kind is unknown or the requests are too few to make up the steps.
    """
    if kind not in MODELS:
        raise ValueError(f"there is no stage of kind {kind!r}: choose one of {', '.join(KINDS)}.")
    model = MODELS[kind]
    script = _script(model)
    weights = _weights(model)
    standing = len(weights) * 3 + 2 * model.num_layers * num_steps
    each = len(script.rate) * model.num_chunks * num_steps
    microbatches = -(-(num_requests - standing) // each)
    if model.num_chunks > 1:  # whole groups of microbatches, one for each stage: a schedule needs no less
        microbatches = max(microbatches, model.num_stages)
    if microbatches < 1:
        raise ValueError(f"{num_requests} requests are too few for {num_steps} steps of a {kind} stage: ask for more.")
    return _play(
        f"{kind}, {num_steps} step{'s' * (num_steps > 1)}", model, script, weights, num_steps, microbatches, seed
    )


@dataclass
class _Writer:
    """One microbatch of one chunk, written down event by event; each pass has a clock of its own."""

    clock: list[int] = field(default_factory=lambda: [0, 0])
    rows: list[list[int]] = field(default_factory=list)  #: birth pass, birth, death pass, death, rate, fixed, expert

    def alloc(self, where: int, rate: int, fixed: int = 0, expert: int = -1) -> int:
        """A request of rate x tokens + fixed bytes; its row."""
        self.rows.append([where, self.clock[where], -1, -1, rate, fixed, expert])
        self.clock[where] += 1
        return len(self.rows) - 1

    def free(self, where: int, *rows: int) -> None:
        for row in rows:
            assert self.rows[row][2] < 0, "freed twice"
            self.rows[row][2:4] = where, self.clock[where]
            self.clock[where] += 1

    def brief(self, where: int, rate: int, fixed: int = 0) -> None:
        """A workspace: gone before the next request."""
        self.free(where, self.alloc(where, rate, fixed))


class _Script(NamedTuple):
    """The requests of one microbatch in one chunk, and how many events its two passes have."""

    birth_pass: Column
    birth: Column
    death_pass: Column
    death: Column
    rate: Column  #: bytes a token
    fixed: Column  #: bytes
    expert: Column  #: row of the routing table whose tokens count; -1: all tokens
    num_forward: int  #: events of the forward pass
    num_backward: int


def _script(model: Model) -> _Script:
    writer = _Writer()
    tokens_in = writer.alloc(FORWARD, 8)
    hidden = writer.alloc(FORWARD, 2 * model.hidden)
    layers = []
    for layer in range(model.num_layers // model.num_chunks):
        saved, output = _forward(writer, FORWARD, model, layer, keep=not model.recompute)
        layers.append((layer, hidden, saved))
        hidden = output
    gradient = writer.alloc(BACKWARD, 2 * model.hidden)
    writer.free(BACKWARD, hidden)
    for layer, entered, saved in reversed(layers):
        if model.recompute:
            saved, output = _forward(writer, BACKWARD, model, layer, keep=True)
            writer.free(BACKWARD, output)
        gradient = _backward(writer, model, gradient, saved)
        writer.free(BACKWARD, entered)
    writer.free(BACKWARD, gradient, tokens_in)
    columns = np.array(writer.rows, np.int64).T
    return _Script(*columns, *writer.clock)


def _forward(writer: _Writer, where: int, model: Model, layer: int, *, keep: bool) -> tuple[list[int], int]:
    """One layer; returns what its backward pass needs, in order, and its output."""
    saved: list[int] = []

    def save(rate: int, expert: int = -1) -> int:
        saved.append(writer.alloc(where, rate, expert=expert))
        return saved[-1]

    width, inner = 2 * model.hidden, 2 * model.feed_forward
    save(8)  # statistics of the norm
    save(width)
    save(width + 4 * model.key_value)  # queries, keys, values
    writer.brief(where, width // 2)  # rotary embedding
    save(width)  # attention
    save(4 * model.num_heads)
    projected = writer.alloc(where, width)
    writer.brief(where, 0, 32 << 20)
    save(width)  # residual
    writer.free(where, projected)
    save(8)
    save(width)
    if model.num_experts:
        save(4 * model.num_experts)  # router
        save(EXPERTS_PER_TOKEN * width)  # tokens in the experts' order
        outputs = []
        for expert in range(model.num_experts):
            row = layer * model.num_experts + expert
            save(2 * inner, row)
            save(inner, row)
            outputs.append(writer.alloc(where, width, expert=row))
        gathered = writer.alloc(where, EXPERTS_PER_TOKEN * width)
        writer.free(where, *outputs)
    else:
        save(2 * inner)
        save(inner)
        gathered = writer.alloc(where, width)
        writer.brief(where, 0, 32 << 20)
    output = writer.alloc(where, width)
    writer.free(where, gathered)
    if not keep:
        writer.free(where, *saved)
        saved = []
    return saved, output


def _backward(writer: _Writer, model: Model, incoming: int, saved: list[int]) -> int:
    """One layer; frees what it saved, last first, and returns the gradient of its input."""
    gradient = writer.alloc(BACKWARD, 2 * model.hidden)
    for row in reversed(saved):
        rate, expert = writer.rows[row][4], writer.rows[row][6]
        if rate >= model.hidden:  # statistics have no gradient
            following = writer.alloc(BACKWARD, rate, expert=expert)
            writer.brief(BACKWARD, 0, 2 * model.hidden * rate // (2 + 2 * (expert >= 0)))  # gradient of a weight
            writer.free(BACKWARD, gradient)
            gradient = following
        writer.free(BACKWARD, row)
    outgoing = writer.alloc(BACKWARD, 2 * model.hidden)
    writer.free(BACKWARD, gradient, incoming)
    return outgoing


def _weights(model: Model) -> Column:
    """(w,) bytes of the parameters in 16 bits."""
    attention = [model.hidden * (model.hidden + 2 * model.key_value), model.hidden * model.hidden, model.hidden]
    experts = max(model.num_experts, 1)
    feed = [2 * model.hidden * model.feed_forward, model.feed_forward * model.hidden] * experts + [model.hidden]
    return 2 * np.array((attention + feed) * model.num_layers, np.int64)


def schedule(model: Model, microbatches: int) -> list[tuple[int, int, int]]:
    """The passes of a step in order: (forward or backward, microbatch, chunk)."""
    ahead = model.num_stages - model.stage - 1
    if model.num_chunks == 1:
        units = [(m, 0) for m in range(microbatches)]
        backward = units
    else:
        units, backward = [], []
        for first in range(0, microbatches, model.num_stages):
            group = range(first, min(first + model.num_stages, microbatches))
            units += [(m, chunk) for chunk in range(model.num_chunks) for m in group]
            backward += [(m, chunk) for chunk in reversed(range(model.num_chunks)) for m in group]
        ahead = 2 * ahead + (model.num_chunks - 1) * model.num_stages
    ahead = min(ahead, len(units))
    passes = [(FORWARD, *unit) for unit in units[:ahead]]
    for unit, done in zip(units[ahead:], backward, strict=False):
        passes += [(FORWARD, *unit), (BACKWARD, *done)]
    return passes + [(BACKWARD, *unit) for unit in backward[len(units) - ahead :]]


def _play(
    name: str, model: Model, script: _Script, weights: Column, num_steps: int, microbatches: int, seed: int
) -> Stage:
    """The script for every microbatch and chunk of every step, each pass at its place in time."""
    rng = np.random.default_rng(seed)
    passes = schedule(model, microbatches)
    length = np.array([(script.num_forward, script.num_backward)[kind] for kind, _, _ in passes], np.int64)
    standing = np.concatenate([weights, 2 * weights, 6 * weights // model.shards])  # weights, gradients, optimizer
    optimizer = np.tile([40_000_000, 20_000_000], model.num_layers)  # buckets: allocated in pairs, freed in pairs
    step_events = int(length.sum()) + 2 * len(optimizer)

    begin = np.zeros((2, microbatches, model.num_chunks), np.int64)
    at = np.cumsum(length) - length
    for (kind, m, chunk), time in zip(passes, at.tolist(), strict=True):
        begin[kind, m, chunk] = time
    tokens = np.full((num_steps, microbatches, 1), model.tokens, np.int64)
    if model.jitter:
        tokens = np.rint(tokens * rng.uniform(1 - model.jitter, 1 + model.jitter, tokens.shape)).astype(np.int64)

    shape = (num_steps, microbatches, model.num_chunks, len(script.rate))
    shift = len(standing) + step_events * np.arange(num_steps)[:, None, None, None]
    start = np.broadcast_to(shift + (begin[script.birth_pass] + script.birth[:, None, None]).transpose(1, 2, 0), shape)
    end = np.broadcast_to(shift + (begin[script.death_pass] + script.death[:, None, None]).transpose(1, 2, 0), shape)
    counted = tokens[..., None]
    if model.num_experts:
        counted = _routed(rng, model, script, tokens)
    size = np.broadcast_to(script.rate * counted + script.fixed, shape)

    when = len(standing) + step_events * np.arange(num_steps)[:, None] + int(length.sum())
    place = np.arange(len(optimizer))
    pair_start = when + 2 * (place - place % 2) + place % 2
    horizon = len(standing) + step_events * num_steps
    columns = [
        np.concatenate([np.arange(len(standing)), start.ravel(), pair_start.ravel()]),
        np.concatenate([np.full(len(standing), horizon), end.ravel(), (pair_start + 2).ravel()]),
        np.concatenate([standing, size.ravel(), np.tile(optimizer, num_steps)]),
    ]
    order = np.argsort(columns[0], kind="stable")
    edges = len(standing) + (step_events * np.arange(num_steps)[:, None] + np.append(at, length.sum())).ravel()
    rounded = -(-np.maximum(columns[2], 1) // GRANULE) * GRANULE
    return Stage(name, columns[0][order], columns[1][order], rounded[order], edges, num_steps, microbatches)


def _routed(rng: np.random.Generator, model: Model, script: _Script, tokens: Column) -> Column:
    """(steps, microbatches, chunks, rows) tokens that count for each request: an expert sees only those sent to it."""
    layers = model.num_layers // model.num_chunks
    batch = (*tokens.shape[:2], model.num_chunks)
    liking = rng.dirichlet(np.full(model.num_experts, 20.0), (*batch, layers))
    sent = rng.multinomial(np.broadcast_to(tokens * EXPERTS_PER_TOKEN, batch)[..., None], liking)
    everyone = np.broadcast_to(tokens, batch)[..., None]
    table = np.concatenate([sent.reshape(*batch, -1), everyone], axis=-1)  # the last row is that of -1
    return table[..., script.expert]
