"""What the libraries' own allocators need for a program, kept in a file, since it does not change with stalloc.

Contract: a kept result is used for the same sources of the program and of the virtual GPU, and the same versions of
torch and CuPy only.
"""

import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harm.catalogue import ROOT, Program
from harm.running import Setting, run
from stalloc.files import write_whole

GRANULE = 2 << 20


@dataclass(frozen=True)
class Peer:
    peak_bytes: int  #: held at most on ample devices, all devices together
    allocated_peak_bytes: int | None
    num_kinds: int  #: kinds of steps, by the number and the bytes of their requests
    num_steps: int
    maps: int
    too_little_bytes: int  #: allocated at most on one device; less than that cannot do
    enough_bytes: int  #: held at most on one device
    least_bytes: int | None = None  #: memory of each device with which it completes, to 0.5 %; None: not looked for
    failure: str = ""


def settings(program: Program) -> tuple[Setting, Setting]:
    return Setting.DEFAULT, Setting.ASYNC if program.is_cupy else Setting.EXPANDABLE


class KeptPeers:
    """The file of the peers' results; written after each new one, so that nothing is lost when a run is broken off."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def find(self, program: Program, setting: Setting, *, least: bool) -> Peer:
        key, print_ = f"{program.name} {setting.value}", _fingerprint(program)
        with self._lock:
            entry = self._kept.get(key)
        peer = Peer(**entry["peer"]) if entry and entry["of"] == print_ else _measure(program, setting)
        if least and peer.least_bytes is None and not peer.failure:
            too_little = peer.too_little_bytes - GRANULE
            found = smallest(lambda size: run(program, setting, size).is_complete, too_little, peer.enough_bytes)
            peer = replace(peer, least_bytes=found)
        new = {"of": print_, "peer": asdict(peer)}
        if new != entry and not peer.failure:
            with self._lock:
                self._kept[key] = new
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(str(self._path), json.dumps(self._kept, indent=1, sort_keys=True) + "\n")
        return peer


def _measure(program: Program, setting: Setting) -> Peer:
    outcome = run(program, setting)
    if not outcome.is_complete:
        failure = f"exit code {outcome.code}: {outcome.last_line}"
        return Peer(0, None, 0, 0, 0, 0, 0, failure=failure)
    kinds = [step["kind"] for step in outcome.seen["steps"]]
    allocated = outcome.allocated_peak_bytes
    return Peer(
        peak_bytes=outcome.peak_bytes,
        allocated_peak_bytes=allocated,
        num_kinds=len(set(kinds)),
        num_steps=len(kinds),
        maps=outcome.seen["statistics"]["maps"],
        too_little_bytes=outcome.least_capacity("allocated") if allocated is not None else 0,
        enough_bytes=outcome.least_capacity("held"),
    )


def smallest(fits: Callable[[int], bool], too_little: int, enough: int) -> int:
    """The smallest multiple of 2 MiB with which it fits, to 0.5 %; what was enough with room may have to grow."""
    enough = -(-enough // GRANULE) * GRANULE
    while not fits(enough):
        too_little, enough = enough, (enough + enough // 50) // GRANULE * GRANULE + GRANULE
    while enough - too_little > max(GRANULE, enough // 200):
        middle = (too_little + enough) // 2 // GRANULE * GRANULE
        if middle <= too_little:
            break
        too_little, enough = (too_little, middle) if fits(middle) else (middle, enough)
    return enough


def _fingerprint(program: Program) -> str:
    digest = hashlib.sha256(" ".join(program.arguments).encode())
    for path in (*program.sources, *sorted((ROOT / "stalloc" / "device").glob("virtual_*.[ch]"))):
        digest.update(path.read_bytes())
    for package in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            digest.update(importlib.metadata.version(package).encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(b"-")
    return digest.hexdigest()[:16]
