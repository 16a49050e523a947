"""The tools of `stalloc mcp`: each runs a verb in a process of its own. Their docstrings are what an agent reads.

Imported only where the mcp package is: it is an extra.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.agent_answers import answer
from stalloc.cli.allowed_files import allowed_file
from stalloc.errors import BadInputError
from stalloc.sizing.model_program import KNOWN
from stalloc.version import full_version

_MOST_OUTPUT = 2000  # characters of what a failed verb printed, from its end
_INSTRUCTIONS = (
    "GPU memory of PyTorch and CuPy programs: why it ran out (explain), who holds it (top), what other allocators or "
    "settings would have done (simulate), what a model or a program needs without a GPU (estimate, dryrun, fit). Sizes "
    "are bytes. Nothing is measured on a GPU; `uncertain` and `notes` say what is not known."
)

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
    reads = server.tool(annotations=ToolAnnotations(readOnlyHint=True, openWorldHint=False), structured_output=True)
    for tool in (tools.explain, tools.stats, tools.top, tools.simulate, tools.policies, tools.estimate):
        reads(tool)
    runs = server.tool(annotations=ToolAnnotations(readOnlyHint=False, openWorldHint=True), structured_output=True)
    for program_tool in (tools.dryrun, tools.fit):
        runs(program_tool)
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
            words = [
                f"--budget={budget}",
                *_option("host", host),
                *_option("gpu", gpu),
                f"--output={folder}/one.fit.npz",
            ]
            found = await self._ask("fit", *words, "--", path, *arguments, most=1000)  # `best` counts all candidates
        found["result"]["output"] = None
        return found

    def _file(self, name: str) -> str:
        try:
            return str(allowed_file(name, self._folders))
        except BadInputError as error:
            raise ToolError(str(error)) from None

    def _script(self, name: str) -> str:
        if not self._may_run:
            raise ToolError("programs are not run: the user has to start `stalloc mcp` with --allow-run.")
        return self._file(name)

    async def _ask(self, verb: str, *words: str, most: int = 20) -> dict[str, Any]:
        code, out, said = await _run_verb([verb, "--json", "-", *words], self._folders[0])
        if code not in (EXIT_DONE, EXIT_CHECK_FAILED) or not out.strip():
            raise ToolError(said[-_MOST_OUTPUT:].strip() or f"stalloc {verb} ended with code {code}.")
        return answer(verb, json.loads(out), most)


def _option(name: str, value: str) -> list[str]:
    """An option in one word, so that no value is taken for another option."""
    return [f"--{name}={value}"] if value else []


async def _run_verb(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Run a verb in a process of its own, which ends with the question; its exit code and what it printed."""
    variables = {name: value for name, value in os.environ.items() if name != "STALLOC"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stalloc", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=said,
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
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
