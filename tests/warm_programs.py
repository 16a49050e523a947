"""Running small programs without what a Python takes to start and to import torch and CuPy: see warm_interpreter.py.

Each program is a process of its own. A fresh interpreter is for what is read at its start: STALLOC=1 by the hook,
PYTHON…, TRITON_…, torch's backend, XDG_CACHE_HOME, a machine without a driver.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).parent / "programs" / "warm_interpreter.py"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads do not outlive a fork


def without_compiling(said: str) -> str:
    """What was said on standard error, without that something was compiled, which depends on what ran before."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("stalloc: compiling for this machine"))


class WarmInterpreter:
    """A process that has imported the large libraries, started at first use; each program gets a fork of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        source: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        folder: str,
        timeout: float,
        stdout: int | None = None,
        stdin: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as `python -c` would, and return what came of it. Raises TimeoutExpired."""
        if self._process is None:
            self._start()
        request = {"source": source, "arguments": arguments, "variables": dict(variables), "folder": folder}
        with open(os.devnull) as nothing, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as stderr:
            data = json.dumps(request).encode() + b"\n"
            stdin = nothing.fileno() if stdin is None else stdin
            stdout = said.fileno() if stdout is None else stdout
            sent = socket.send_fds(self._connection, [data], [stdin, stdout, stderr.fileno()])
            self._connection.sendall(data[sent:])
            number = int(self._answers.readline())
            self._connection.settimeout(timeout)
            try:
                code = int(self._answers.readline())
            except TimeoutError:
                os.kill(number, signal.SIGKILL)
                self.end()
                raise subprocess.TimeoutExpired(source, timeout) from None
            written = []
            for file in (said, stderr):
                file.seek(0)
                written.append(file.read().decode())
        written[1] = without_compiling(written[1])
        return subprocess.CompletedProcess(["-c", source, *arguments], code, *written)

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )
        self._answers = self._connection.makefile("r")

    def end(self) -> None:
        """Let the process end, which it does with its connection; it starts again when it is needed."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._answers.close()
                self._connection.close()
            self._process.wait()
            self._process = None


_INTERPRETER = WarmInterpreter()
atexit.register(_INTERPRETER.end)


def run_warm(
    source: str,
    *arguments: object,
    folder: Path | str | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float = 300,
    stdout: int | None = None,
    stdin: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python -c` would; no variables but `variables`, if they are given.

    It reads from `stdin`, by default nothing, and prints to `stdout`, both descriptors.
    """
    environment = os.environ if variables is None else variables
    texts = [str(argument) for argument in arguments]
    return _INTERPRETER.run(source, texts, environment, str(folder or os.getcwd()), timeout, stdout, stdin)


def run_stalloc(
    *arguments: object,
    folder: Path | str | None = None,
    variables: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stdin: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command line; arguments as of `run_warm`."""
    source = "import sys\nfrom stalloc.cli import main\nsys.exit(main())"
    return run_warm(source, *arguments, folder=folder, variables=variables, stdout=stdout, stdin=stdin)


def run_file(
    path: Path,
    *arguments: object,
    folder: Path | str | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that lies in a file; arguments as of `run_warm`."""
    source = (
        "import os, runpy, sys\ndel sys.argv[0]\nsys.path[0] = os.path.dirname(sys.argv[0])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return run_warm(source, path, *arguments, folder=folder, variables=variables, timeout=600)


def run_compiling(source: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose functions are compiled, without the start of a Python and the import of numba."""
    anew = "import sys, numba; sys.dont_write_bytecode = True; numba.config.reload_config()\n"
    return run_warm(anew + source, *arguments, variables=os.environ | variables)


def told_by_file(path: Path, *arguments: object) -> Any:
    """What a program that lies in a file prints as JSON in its last line."""
    done = run_file(path, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
