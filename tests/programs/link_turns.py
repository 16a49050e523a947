"""Two processes that share a link to the host, each with half of what it saves there: prints what came of it as JSON.

On the virtual GPU, whose copies are all real here. Whoever copies makes a file that the other must not find; so it is
seen without asking who has the turn. On the processor losses, gradients and parameters are compared bit by bit.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))

import offloading  # noqa: E402  (the device is in place)
import torch  # noqa: E402
from equality import same  # noqa: E402
from refusals import sentence  # noqa: E402

import stalloc  # noqa: E402
from stalloc.techniques.transfers import Copied, listeners  # noqa: E402

LAYERS, STEPS, NUMBERS = 8, 6, 1 << 16
ENDING_COPY = 5  #: of the first rank, in the midst of which it ends, or stops


class Keeps(torch.autograd.Function):
    """Saves numbers that backward has to find again."""

    wrong = 0

    @staticmethod
    def forward(context: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        context.number = number
        context.save_for_backward(torch.full((NUMBERS,), float(number)).to("cuda"))
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = context.saved_tensors
        Keeps.wrong += not bool((saved.cpu() == context.number).all())
        return gradient, None


def train(
    folder: str, rank: int, patience: float, end: Callable[[], None], begin: Callable[[], None]
) -> dict[str, Any]:
    """Some steps of one rank, after one that does not count and takes longer than all; `begin` is called between."""
    found = {"overlaps": 0, "copies": 0}
    outwards = {"copies": 0}

    def copied(copy: Copied) -> None:
        found["copies"] += 1
        mark = f"{folder}/{'back' if copy.to_device else 'out'}"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            found["overlaps"] += 1
            return
        with open(f"{folder}/order", "a") as order:
            order.write(f"{rank}")
        time.sleep(2e-3)  # in which the other one gets a processor
        os.unlink(mark)
        outwards["copies"] += not copy.to_device
        if outwards["copies"] == ENDING_COPY and not copy.to_device:
            end()

    _step(stalloc.offload_activations(0.5, window="512KiB"))
    listeners.append(copied)
    link = stalloc.SharedLink(f"{folder}/link", rank=rank, num_ranks=2, patience_seconds=patience)
    offload = stalloc.offload_activations(0.5, window="512KiB", link=link)
    begin()
    for _ in range(STEPS):
        _step(offload)
    assert offload.turns is not None
    return {**found, "wrong": Keeps.wrong, "left_bytes": offload.left_bytes, "without": offload.turns.num_without}


def _step(offload: Any) -> None:
    x = torch.zeros(16, device="cuda", requires_grad=True)
    with offload:
        y = x
        for number in range(LAYERS):
            y = Keeps.apply(y, number)
    y.sum().backward()


def end_by(number: int) -> None:
    """Whichever thread the signal reaches first, this one does no more."""
    os.kill(os.getpid(), number)
    while True:
        pass


def ranks(patience: float, end: Callable[[], None] = lambda: None, *, together: bool = True) -> list[Any]:
    """What both ranks found, or None of one that did not come to its end; and the order of their copies.

    Unless they run `together` the second begins when the first has ended, or stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        begins, ready = [os.pipe() for _ in range(2)], os.pipe()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                for _, end_of_pipe in begins:
                    os.close(end_of_pipe)

                def begin(rank: int = rank) -> None:
                    os.close(ready[1])
                    os.read(begins[rank][0], 1)

                told = train(folder, rank, patience, end if rank == 0 else lambda: None, begin)
                with open(f"{folder}/{rank}.json", "w") as file:
                    json.dump(told, file)
                os._exit(0)
            children.append(child)
        os.close(ready[1])
        os.read(ready[0], 1)  # until both are ready, or gone
        os.close(begins[0][1])
        status = 0 if together else os.waitpid(children[0], os.WUNTRACED)[1]
        os.close(begins[1][1])
        os.waitpid(children[1], 0)
        if os.WIFSTOPPED(status):
            os.kill(children[0], signal.SIGKILL)
        if together or os.WIFSTOPPED(status):
            os.waitpid(children[0], 0)
        found: list[Any] = [_read(f"{folder}/{rank}.json") for rank in range(2)]
        return [*found, _read(f"{folder}/order", parsed=False)]


def _read(path: str, *, parsed: bool = True) -> Any:
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file) if parsed else file.read()


def is_equal() -> bool:
    """A small GPT, whose activations go to the host in turn."""
    with tempfile.TemporaryDirectory() as folder:
        link = stalloc.SharedLink(f"{folder}/link", rank=1, num_ranks=2)
        offload = stalloc.offload_activations(0.5, window="200KiB", device="cpu", link=link)
        habits = {"accumulate"}
        as_it_is, in_turn = (
            offloading.train(offloading.gpt(), habits, context) for context in (nullcontext(), offload)
        )
        return same(as_it_is, in_turn) and offload.left_bytes > 0


def main() -> None:
    told: dict[str, Any] = {
        "both": ranks(60.0),
        "one dies": ranks(60.0, lambda: end_by(signal.SIGKILL)),
        "one hangs": ranks(0.05, lambda: end_by(signal.SIGSTOP), together=False),
    }
    told["equal"] = is_equal()  # last: there is no fork after a backward pass
    told["no file"] = sentence(lambda: stalloc.offload_activations(link=stalloc.SharedLink("/proc/none/link")))
    told["no rank"] = sentence(lambda: stalloc.SharedLink("link", rank=2, num_ranks=2))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
