"""A replay under a budget against a second one, written plainly from the rules and from the format of the log."""

import functools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from properties import holds_for

from stalloc.eviction.programs import read_simulator_log
from stalloc.eviction.replay import Ending, replay

EVERY_POLICY = ("dtr", "dtr-eq", "dtr-local", "lru", "size", "msps")


class OutOfMemoryError(Exception):
    pass


class TooLongError(Exception):
    pass


class Naive:
    """Follows the lines of a log. A storage is `puts`, the calls that put something there; a tensor is one of those."""

    def __init__(self, policy, budget=math.inf, longest=math.inf):
        self.policy, self.budget, self.longest = policy, budget, longest
        self.now = self.allocated = self.again = self.evictions = self.evicted_bytes = 0
        self.evictable = []  # storages, by when they became so
        self.names, self.last_of = {}, {}
        self.classes = {}  # of storages that are not there: a list with their cost, which members share

    # what the log says -------------------------------------------------------------------------------------------
    def follow(self, entries):
        waiting = list(reversed(entries))
        while waiting:
            entry = waiting.pop()
            kind = entry["INSTRUCTION"]
            if kind == "CONSTANT":
                size = int(waiting.pop()["MEMORY"])
                (made,) = self.call(0, [], [(size, None)])
                made.storage.locks = math.inf
                self.evictable.remove(made.storage)
                self.name(entry["NAME"], made)
            elif kind == "CALL":
                args, told = [self.names[name] for name in entry["ARGS"]], []
                for _ in entry["RESULT"]:
                    size, view = int(waiting.pop()["MEMORY"]), int(waiting.pop()["ALIAS"])
                    told.append((size, None) if view < 0 else (0, args[view].storage))
                for name, made in zip(entry["RESULT"], self.call(int(entry["TIME"]), args, told), strict=True):
                    self.name(name, made)
            elif kind == "MUTATE":
                args, names = [self.names[name] for name in entry["ARGS"]], [entry["ARGS"][n] for n in entry["MUTATE"]]
                made = self.call(int(entry["TIME"]), args, [(self.names[name].storage.size, None) for name in names])
                for name, one in zip(names, made, strict=True):
                    self.release(name)
                    self.name(name, one)
            elif kind == "COPY":
                self.name(entry["DST"], self.names[entry["SRC"]], is_more=True)
            elif kind == "COPY_FROM":
                other = self.names[entry["SRC"]]
                other.storage.names += 1
                self.release(entry["DST"])
                self.name(entry["DST"], other)
            elif kind == "RELEASE" and entry["NAME"] in self.names:
                self.release(entry["NAME"])
        held = {id(one) for one in self.names.values()}
        for one in self.last_of.values():
            if id(one) in held:
                self.make(one)
                self.lock(one.storage)

    def name(self, name, tensor, is_more=False):
        tensor.storage.names += is_more
        self.names[name] = self.last_of[name] = tensor

    def release(self, name):
        storage = self.names.pop(name).storage
        storage.names -= 1
        if storage.names == 0 and storage.is_there and storage.locks == 0:
            self.evict(storage)

    # calls ----------------------------------------------------------------------------------------------------------
    def call(self, ticks, args, told):
        call = SimpleNamespace(ticks=ticks, args=args, outs=[])
        for size, view_of in told:
            storage = view_of or SimpleNamespace(
                size=size, is_there=False, locks=0, names=0, used=0, puts=[], made_from=[], read_by=[]
            )
            storage.names += 1
            if view_of is None:
                self.classes[id(storage)] = [0]
            call.outs.append(SimpleNamespace(call=call, storage=storage, is_view=view_of is not None, is_made=False))
            storage.puts.append(call.outs[-1])
        for out in call.outs:
            for arg in args:
                out.storage.made_from.append(arg.storage)
                arg.storage.read_by.append(out.storage)
        if call.outs:
            self.run(call, call.outs[0], is_first=True)
        for out in call.outs:
            out.storage.used = self.now
        return call.outs

    def make(self, tensor):
        if not tensor.is_made:
            self.run(tensor.call, tensor, is_first=False)

    def run(self, call, wanted, is_first):
        for arg in call.args:
            arg.storage.used = self.now
        missing = [arg for arg in call.args if not arg.is_made]
        for arg in call.args:
            if arg.is_made:
                self.lock(arg.storage)
        for arg in missing:
            self.make(arg)
            self.lock(arg.storage)
        total = sum(out.storage.size for out in call.outs if not out.is_view)
        while self.allocated + total > self.budget:
            self.evict_one()
        new = [out.storage for out in call.outs if out is not wanted and not out.storage.is_there]
        new += [wanted.storage] if not wanted.storage.is_there else []
        for storage in new:
            storage.is_there = True
            self.allocated += storage.size
            if id(storage) in self.classes:
                self.classes.pop(id(storage))[0] -= cost(storage)
        for out in call.outs:
            out.is_made = True
        self.now += call.ticks
        self.again += 0 if is_first else call.ticks
        self.evictable += new
        for arg in call.args:
            arg.storage.locks -= 1
            if arg.storage.locks == 0:
                self.evictable.append(arg.storage)
        if self.again > self.longest:
            raise TooLongError

    def lock(self, storage):
        storage.locks += 1
        self.evictable = [one for one in self.evictable if one is not storage]

    # eviction -------------------------------------------------------------------------------------------------------
    def evict_one(self):
        if not self.evictable:
            raise OutOfMemoryError
        scores = [self.score(one) for one in self.evictable]
        lowest = min(scores)
        equals = [one for one, score in zip(self.evictable, scores, strict=True) if score == lowest]
        chosen = equals[0 if lowest == 0 else -1]
        self.evictions += 1
        self.evicted_bytes += chosen.size
        self.evict(chosen)

    def evict(self, storage):
        storage.is_there = False
        self.allocated -= storage.size
        self.evictable = [one for one in self.evictable if one is not storage]
        for tensor in storage.puts:
            tensor.is_made = False
        joined = [cost(storage)]
        for known in self.classes_beside(storage):
            joined[0] += known[0]
            for member, group in self.classes.items():
                if group is known:
                    self.classes[member] = joined
        self.classes[id(storage)] = joined

    def classes_beside(self, storage):
        near = [one for one in storage.made_from + storage.read_by if one is not storage and not one.is_there]
        return list({id(group): group for group in (self.classes[id(one)] for one in near)}.values())

    def score(self, storage):
        if self.policy == "lru":
            return 1 + storage.used  # never nothing
        if storage.size == 0:
            return math.inf
        if self.policy == "size":
            return 1 / storage.size
        total = cost(storage)
        if self.policy in ("dtr", "msps"):
            total += beyond(storage, "made_from")
        if self.policy == "msps":
            return total / storage.size
        if self.policy == "dtr":
            total += beyond(storage, "read_by")
        if self.policy == "dtr-eq":
            total += sum(group[0] for group in self.classes_beside(storage))
        age = self.now - storage.used
        return total / (storage.size * age) if age else math.inf


def cost(storage):
    return sum(call.ticks for call in {id(one.call): one.call for one in storage.puts}.values())


def beyond(storage, side):
    """The cost of what is reached over evicted storages alone."""
    found, waiting = {}, [storage]
    while waiting:
        for one in getattr(waiting.pop(), side):
            if not one.is_there and id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    return sum(map(cost, found.values()))


def naive(entries, policy, budget=math.inf, longest=math.inf):
    made = Naive(policy, budget, longest)
    try:
        made.follow(entries)
    except OutOfMemoryError:
        return Ending.OUT_OF_MEMORY, None, made.evictions, made.evicted_bytes
    except TooLongError:
        return Ending.TOO_LONG, None, made.evictions, made.evicted_bytes
    return Ending.COMPLETE, made.again, made.evictions, made.evicted_bytes


def compiled(entries, policy, budget, base):
    made = replay(as_program(json.dumps(entries)), policy, budget)
    again = None if made.overhead is None else round((made.overhead - 1) * base)
    return made.ending, again, made.evictions, made.evicted_bytes


@functools.lru_cache(maxsize=8)
def as_program(text):
    return read_simulator_log(Path("a.log"), "\n".join(map(json.dumps, json.loads(text))).encode())


def peak_and_ticks(entries):
    made, most = Naive("lru"), [0]

    def note(call, wanted, is_first, run=made.run):
        most[0] = max(most[0], made.allocated + sum(out.storage.size for out in call.outs if not out.is_view))
        run(call, wanted, is_first)

    made.run = note
    made.follow(entries)
    return most[0], made.now


# logs ---------------------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.entries = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]
        self.live = []

    def add(self, kind, **rest):
        self.entries.append({"INSTRUCTION": kind} | rest)

    def new(self):
        self.live.append(f"x{len(self.entries)}.{len(self.live)}")
        return self.live[-1]

    def constant(self, size):
        name = self.new()
        self.add("CONSTANT", NAME=name)
        self.add("MEMORY", NAME=name, MEMORY=str(size))
        return name

    def call(self, ticks, args, *made):
        """`made`: for each result its bytes, and the number of the argument in whose memory it lies, or -1."""
        names = [self.new() for _ in made]
        self.add("CALL", NAME="f", ARGS=list(args), RESULT=names, TIME=str(ticks))
        for name, (size, view_of) in zip(names, made, strict=True):
            self.add("MEMORY", NAME=name, MEMORY=str(size))
            self.add("ALIAS", NAME=name, ALIAS=str(view_of))
        return names

    def release(self, *names):
        for name in names:
            self.live.remove(name)
            self.add("RELEASE", NAME=name)


def random_log(draw):
    log = Writer()
    log.constant(draw.randrange(1, 30))
    for _ in range(draw.randrange(10, 90)):
        recent = log.live[-7:] or [log.constant(4)]
        kind = draw.choices(
            ("call", "change", "copy", "copy from", "release", "constant", "other"), (50, 8, 10, 4, 20, 2, 4)
        )
        args = [draw.choice(recent) for _ in range(draw.randrange(1, 4))]
        if kind == ["call"]:
            made = [
                (draw.choice((0, 1, 8, 8, 8, 16, 20, 40)), draw.randrange(len(args)) if draw.random() < 0.25 else -1)
                for _ in range(draw.choice((1, 1, 1, 2, 3)))
            ]
            log.call(draw.choice((0, 1, 2, 5, 10, 50)), args, *made)
        elif kind == ["change"]:
            args = list(dict.fromkeys(args))
            log.add("MUTATE", NAME="f_", ARGS=args, MUTATE=draw.sample(range(len(args)), 1), TIME=draw.choice("139"))
        elif kind == ["copy"]:
            log.add("COPY", SRC=args[0], DST=log.new())
        elif kind == ["copy from"] and len(log.live) > 1:
            to, source = draw.sample(log.live, 2)
            log.add("COPY_FROM", DST=to, SRC=source)
        elif kind == ["release"] and len(log.live) > 2:
            log.release(draw.choice(log.live))
        elif kind == ["constant"]:
            log.constant(draw.randrange(1, 30))
        else:
            log.add("RELEASE", NAME="what was before the start")
            log.add("ANNOTATE", ANNOTATION="BACKWARD")
    return log.entries


@holds_for(st.randoms(use_true_random=False), few=12, many=300)
def test_a_replay_does_what_the_plain_one_does(draw):
    entries = random_log(random.Random(draw.getrandbits(40)))
    peak, ticks = peak_and_ticks(entries)
    for share in (1.0, 0.85, 0.6, 0.4):
        for policy in EVERY_POLICY if ticks else ():
            expected = naive(entries, policy, int(share * peak), ticks)
            assert compiled(entries, policy, int(share * peak), ticks) == expected, (policy, share)


def views():
    """A matrix and two views of it, one of which is read when the matrix and the other were released."""
    log = Writer()
    weight = log.constant(4)
    (matrix,) = log.call(9, [weight], (16, -1))
    (left,) = log.call(1, [matrix], (0, 0))
    (right,) = log.call(1, [matrix], (0, 0))
    (total,) = log.call(2, [left], (8, -1))
    log.release(matrix, left)
    log.release(*log.call(1, [weight], (24, -1)))
    log.call(2, [right, total], (8, -1))
    return log.entries


def changed_in_place():
    """A buffer that is changed twice, under two names, the other of which keeps the first state."""
    log = Writer()
    weight = log.constant(4)
    (buffer,) = log.call(9, [weight], (16, -1))
    kept = log.new()
    log.add("COPY", SRC=buffer, DST=kept)
    for _ in range(2):
        log.add("MUTATE", NAME="add_", ARGS=[buffer, weight], MUTATE=[0], TIME="2")
    log.call(1, [kept], (8, -1))
    log.release(kept)
    log.call(1, [buffer], (8, -1))
    return log.entries


def several_results():
    """Statistics beside a result; the result alone is evicted and read again, the statistics are there."""
    log = Writer()
    weight = log.constant(4)
    result, mean, deviation = log.call(9, [weight], (24, -1), (2, -1), (2, -1))
    log.release(*log.call(3, [weight, mean], (32, -1)))
    log.call(1, [result, mean, deviation], (8, -1))
    return log.entries


def made_again_after_release():
    """A chain whose inner links are released, and whose last one is evicted and read again."""
    log = Writer()
    first = log.constant(4)
    chain = [first]
    for _ in range(4):
        chain += log.call(5, chain[-1:], (10, -1))
    log.add("ANNOTATE", ANNOTATION="BACKWARD")
    log.release(*chain[1:4])
    log.release(*log.call(1, [first], (30, -1)))
    log.call(1, chain[-1:], (8, -1))
    return log.entries


@pytest.mark.parametrize("log", [views, changed_in_place, several_results, made_again_after_release])
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_log_by_hand_is_replayed_as_plainly_written(log, policy):
    entries = log()
    peak, ticks = peak_and_ticks(entries)
    replayed = [naive(entries, policy, budget, ticks) for budget in range(1, peak + 1)]
    assert [compiled(entries, policy, budget, ticks) for budget in range(1, peak + 1)] == replayed
    assert replayed[0][0] == Ending.OUT_OF_MEMORY
    assert any(again for _, again, _, _ in replayed), "a budget at which something is made again"
    assert replayed[-1][:3] == (Ending.COMPLETE, 0, 0)
