"""Running small programs without what a Python takes to start and to import torch and CuPy: see warm_interpreter.py."""

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

_PROGRAM = Path(__file__).parent / "programs" / "warm_interpreter.py"


class WarmInterpreter:
    """A process that has imported the large libraries, started at first use; each program gets a fork of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, source: str, arguments: Sequence[str], variables: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as `python -c` would, and return what came of it. Raises TimeoutExpired."""
        if self._process is None:
            self._start()
        request = {"source": source, "arguments": arguments, "variables": dict(variables), "folder": os.getcwd()}
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._connection, [data], [stdout.fileno(), stderr.fileno()])
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
            for file in (stdout, stderr):
                file.seek(0)
                written.append(file.read().decode())
        return subprocess.CompletedProcess(["-c", source, *arguments], code, *written)

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # threads do not outlive a fork
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
