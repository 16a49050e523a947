"""The tools of `stalloc mcp`: each runs a verb in a process of its own. Their docstrings are what an agent reads.

Contract: a file that is read is a regular one whose real path lies in one of the allowed folders, wherever links lead.
An answer is one sentence and the JSON of the verb with its long lists cut; what is cut is counted. Imported only where
the mcp package is: it is an extra.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.sizing.model_program import KNOWN
from stalloc.version import full_version

_MOST_OUTPUT = 2000  # characters of what a failed verb printed, from its end
_INSTRUCTIONS = (
    "GPU memory of PyTorch and CuPy programs: why it ran out (explain), who holds it (top), what other allocators or "
    "settings would have done (simulate), what a model or a program needs without a GPU (estimate, dryrun, fit). Sizes "
    "are bytes. Nothing is measured on a GPU; `uncertain` and `notes` say what is not known."
)
_ALLOCATORS = {"native": "PyTorch", "expandable": "expandable segments", "stalloc": "stalloc"}

File = Annotated[str, Field(description="a memory snapshot, trace, profile or log, in a folder the user allowed")]
At = Annotated[str, Field(description="peak, oom, an event index, or (top) end; empty: the last error, else the peak")]
Most = Annotated[int, Field(description="items of each list; left_out counts the others", ge=1)]
Script = Annotated[str, Field(description="the Python program, in a folder the user allowed")]
Arguments = Annotated[list[str], Field(description="its arguments")]
Card = Annotated[str, Field(description="a card, such as H100 or RTX-4090; empty: an H200")]
Memory = Annotated[str, Field(description="its memory, such as 24GiB; empty: what the card has")]


def make_server(folders: Sequence[Path], *, may_run: bool) -> MCPServer:
    """The server, which reads files in these folders only, and runs the programs there if it may."""
    tools = Tools(folders, may_run)
    server = MCPServer("stalloc", instructions=_INSTRUCTIONS, version=full_version(), log_level="WARNING")
    reading = (tools.explain, tools.stats, tools.top, tools.simulate, tools.policies, tools.estimate)
    for tool in (*reading, tools.dryrun, tools.fit):
        only_reads = tool in reading
        hints = ToolAnnotations(readOnlyHint=only_reads, openWorldHint=not only_reads)
        server.tool(annotations=hints, structured_output=True)(tool)
    return server


class Tools:
    """What an agent may ask; a ToolError is what it reads instead of an answer."""

    def __init__(self, folders: Sequence[Path], may_run: bool) -> None:
        self._folders = folders
        self._may_run = may_run

    async def explain(self, file: File, at: At = "", most: Most = 20) -> dict[str, Any]:
        """Say why memory ran out, or why more is reserved than allocated; also from a log with the error."""
        return await self._ask("explain", *_option("at", at), self._file(file), most=most)

    async def stats(self, file: File, most: Most = 20) -> dict[str, Any]:
        """Describe a recording: requests, peaks, fragmentation, the lower bound of every plan, streams, steps."""
        return await self._ask("stats", self._file(file), most=most)

    async def top(self, file: File, at: At = "", most: Most = 20) -> dict[str, Any]:
        """Say who holds memory at one moment, by call site, role, module, class and size, and what grows."""
        return await self._ask("top", *_option("at", at), self._file(file), most=most)

    async def simulate(self, file: File, advise: bool = False, most: Most = 20) -> dict[str, Any]:
        """Replay a recording under other allocators; with advise rank PyTorch's settings."""
        return await self._ask("simulate", *(["--advise"] if advise else []), self._file(file), most=most)

    async def policies(self, most: Most = 100) -> dict[str, Any]:
        """List published systems that save memory, and which part of each stalloc implements."""
        return await self._ask("policies", most=most)

    async def estimate(
        self,
        model: Annotated[str, Field(description=f"{', '.join(KNOWN)}, or a config.json in an allowed folder")],
        batch: int = 1,
        seq: int = 1024,
        train: Annotated[str, Field(description="adamw, adamw-fused, adam, sgd, momentum, adafactor")] = "adamw",
        infer: bool = False,
        dtype: Annotated[str, Field(description="bf16, fp16, fp32, or mixed")] = "bf16",
        checkpoint: bool = False,
        gpu: Card = "",
        memory: Memory = "",
        find: Annotated[str, Field(description="search the largest of batch=1..64 or seq=1024..8192:1024")] = "",
    ) -> dict[str, Any]:
        """Estimate the GPU memory that training a language model needs, or generating text with it (infer)."""
        name = model if model.lower() in KNOWN else self._file(model)
        way = ["--infer"] if infer else [f"--train={train}", *(["--checkpoint"] if checkpoint else [])]
        shape = [f"--model={name}", f"--batch={batch}", f"--seq={seq}", f"--dtype={dtype}"]
        card = [*_option("gpu", gpu), *_option("memory", memory), *_option("find", find)]
        return await self._ask("dryrun", *shape, *way, *card)

    async def dryrun(
        self,
        script: Script,
        arguments: Arguments,
        gpu: Card = "",
        memory: Memory = "",
        find: Annotated[
            str, Field(description="batch=1..64: the largest {batch} that fits; gpu: the smallest card")
        ] = "",
    ) -> dict[str, Any]:
        """Run a program on a virtual GPU: what it needs, and whether it fits; `find` searches."""
        card = [*_option("gpu", gpu), *_option("memory", memory), *_option("find", find)]
        return await self._ask("dryrun", *card, "--", self._script(script), *arguments)

    async def fit(
        self,
        script: Script,
        arguments: Arguments,
        budget: Annotated[str, Field(description="reserved memory to keep within, such as 24GiB")],
        host: Annotated[str, Field(description="pinned host memory that may be used, such as 32GiB; empty: none")] = "",
        gpu: Card = "",
    ) -> dict[str, Any]:
        """Find the cheapest way to run a program within a budget, which `stalloc run --budget` then applies."""
        path = self._script(script)
        with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
            words = [f"--budget={budget}", *_option("host", host), *_option("gpu", gpu)]
            words += [f"--output={folder}/one.fit.npz", "--", path, *arguments]
            found = await self._ask("fit", *words, most=1000)  # `best` counts all candidates
        found["result"]["output"] = None
        return found

    def _file(self, name: str) -> str:
        """The real path of a file, a relative name being in the first folder; of others not even that they exist."""
        path = (self._folders[0] / name).resolve() if "\0" not in name else Path("/")
        if not any(path.is_relative_to(folder) for folder in self._folders):
            raise ToolError(
                f"{printable(name)} is not in the folders that this server may read: ask the user for a file in "
                f"{', '.join(printable(str(folder)) for folder in self._folders)}, or to start it with another --allow "
                "FOLDER."
            )
        if not path.is_file():
            folder = printable(str(self._folders[0]))
            raise ToolError(f"there is no file {printable(name)}: relative names are in {folder}.")
        return str(path)

    def _script(self, name: str) -> str:
        if not self._may_run:
            raise ToolError("programs are not run: the user has to start `stalloc mcp` with --allow-run.")
        return self._file(name)

    async def _ask(self, verb: str, *words: str, most: int = 20) -> dict[str, Any]:
        code, out, said = await _run_verb([verb, "--json", "-", *words], self._folders[0])
        if code not in (0, 1) or not out.strip():  # 1: what was asked for does not fit
            raise ToolError(said[-_MOST_OUTPUT:].strip() or f"stalloc {verb} ended with code {code}.")
        left_out: dict[str, int] = {}
        result = _shortened(found := json.loads(out), most, "", left_out)
        return {"sentence": _SENTENCES[verb](found), "result": result, "left_out": left_out}


def _option(name: str, value: str) -> list[str]:
    """An option in one word, so that no value is taken for another option."""
    return [f"--{name}={value}"] if value else []


async def _run_verb(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a verb in a process of its own, which ends with the question; its exit code and what it printed."""
    variables = {name: value for name, value in os.environ.items() if name != "STALLOC"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", "stalloc", *words]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": said}
        process = subprocess.Popen(command, **streams, cwd=folder, env=variables, start_new_session=True)
        try:
            code = await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (out, said):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, *texts


def _shortened(value: Any, most: int, place: str, left_out: dict[str, int]) -> Any:
    """A value of JSON with `most` items in each list; the others are counted in `left_out` (`devices.0.by_site`)."""
    if isinstance(value, dict):
        return {key: _shortened(item, most, f"{place}.{key}".lstrip("."), left_out) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > most:
            left_out[place] = len(value) - most
        return [_shortened(item, most, f"{place}.{at}", left_out) for at, item in enumerate(value[:most])]
    return value


def _explained(found: dict[str, Any]) -> str:
    devices, errors = found["devices"], found["errors"]
    if not devices and not errors:
        return "Nothing could be explained: `not_explained` says why."
    if not devices:
        one = errors[0]
        return f"The error asks for {human_bytes(one['wanted_bytes'] or 0)}: {one['verdict']}."
    one = max(devices, key=lambda device: (device.get("verdict") is not None, device["reserved_bytes"]))
    figures = f"{human_bytes(one['allocated_bytes'])} allocated of {human_bytes(one['reserved_bytes'])} reserved"
    cause, size = max(one["causes"].items(), key=lambda item: item[1])
    gap = f"most of the rest is {cause.replace('_', ' ')}, {human_bytes(size)}"
    if one.get("verdict") is None:
        return f"Device {one['device']}: {figures}; {gap}."
    failed = f"{human_bytes(one['wanted_bytes'])} could not be allocated ({one['verdict']})"
    return f"Device {one['device']}: {failed} with {figures}; {gap}."


def _described(found: dict[str, Any]) -> str:
    one = max(found["devices"], key=lambda device: device["allocated_peak_bytes"])
    reserved = one["reserved_peak_bytes"]
    told = f", {human_bytes(reserved)} reserved" if reserved is not None else ""
    peak = human_bytes(one["allocated_peak_bytes"])
    return f"Device {one['device']}: {plural(one['requests'], 'request')}, at the peak {peak} allocated{told}."


def _held(found: dict[str, Any]) -> str:
    one = max(found["devices"], key=lambda device: device["allocated_bytes"])
    listed = one["by_site"] or one["by_class"] or one["by_size"]
    most = f"; most by {listed[0]['name']}, {human_bytes(listed[0]['held_bytes'])}" if listed else ""
    return f"Device {one['device']} ({one['at']}): {human_bytes(one['allocated_bytes'])} are allocated{most}."


def _simulated(found: dict[str, Any]) -> str:
    if "ranking" in found:
        if found["too_short"]:
            return "The history is too short to rank settings."
        return found["export"] or "No setting of PyTorch's allocator is better by a per cent."
    one = max(found["devices"], key=lambda device: device["recorded"]["allocated_peak_bytes"])
    fitting = [result for result in one["results"] if result["fits"]]
    if not fitting:
        return f"Device {one['device']}: no allocator that was tried completes."
    best = min(fitting, key=lambda result: result["peak_reserved_bytes"])
    name = " ".join(word for word in (best["allocator"], best["settings"]) if word)
    return f"Device {one['device']}: {name} reserves least, {human_bytes(best['peak_reserved_bytes'])}."


def _dry_run(found: dict[str, Any]) -> str:
    shown = {name: found[key] for key, name in _ALLOCATORS.items() if key in found}
    if "parameter" in found:
        parts = [f"{name} {'none' if one['largest'] is None else one['largest']}" for name, one in shown.items()]
        return f"The largest {found['parameter']} on {found['gpu']}: {', '.join(parts)}."
    if found.get("gpu") is None:
        parts = [f"{name} {one['gpu'] or 'none'}" for name, one in shown.items()]
        return f"The smallest card: {', '.join(parts)}."
    parts = [
        f"{name} {'fits' if one['fits'] else 'does not fit'} and needs {human_bytes(one['needed_bytes'])}"
        for name, one in shown.items()
    ]
    return f"On {found['gpu']} ({human_bytes(found['memory_bytes'])}): {', '.join(parts)}."


def _fitted(found: dict[str, Any]) -> str:
    budget = human_bytes(found["budget_bytes"])
    if found["best"] < 0:
        return found["sentence"] or f"Nothing that was tried fits {budget}."
    return f"The cheapest way that fits {budget} is {found['candidates'][found['best']]['what']}."


def _listed(found: dict[str, Any]) -> str:
    executed = sum(one["status"] == "executes" for one in found["systems"])
    return f"{len(found['systems'])} published systems, of which stalloc executes {executed}."


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "explain": _explained,
    "stats": _described,
    "top": _held,
    "simulate": _simulated,
    "dryrun": _dry_run,
    "fit": _fitted,
    "policies": _listed,
}
"""What a verb found, in one sentence."""
