"""Forward passes that call layers of their own, statement by statement: which rows they are cut into, as JSON."""

import copy
import inspect
import json
import os
import traceback
from typing import Any

from stalloc import device

os.environ["STALLOC_CUT_FORWARD"] = "1"
device.activate("virtual")

import torch  # noqa: E402  (the device is in place)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import stalloc  # noqa: E402
from stalloc.techniques.repeated_blocks import find_blocks  # noqa: E402


class Four(nn.Module):
    """Four layers, for what calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))
        self.count = 0


class Straight(Four):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.one(x)
        y = F.relu(self.two(x)) * scale
        x = self.three(x)
        return self.four(x + y)


class Held(nn.Module):
    """A forward pass of one statement, around a module that has more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Straight()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Tied(Four):
    """A layer that is called at both ends belongs to one row, so all between is in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        x = self.four(x)
        return self.one(x)


class Early(Four):
    """What follows a return that may be taken is in the last row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 1:
            return x
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        return self.four(x)


class Perhaps(Four):
    """A variable that may not be set."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim > 1:
            y = self.one(x)
        x = self.two(x)
        x = self.three(x)
        x = self.four(x)
        return x + y if x.ndim > 1 else x


class Counting(Four):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        return self.four(x)


class Handing(Four):
    """A layer in a variable is called where nobody sees that it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.four
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        return last(x)


class Later(Four):
    """A function that looks at a variable later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        add = lambda y: y + x  # noqa: E731
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        return add(self.four(x))


class Decorated(Four):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        return self.four(x)


class Inheriting(Straight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 2


class Failing(Four):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.two(x)
        x = self.three(x)
        raise ValueError(self.four(x).shape)


def exchanged() -> bool:
    """A layer that the program exchanges counts at once."""
    model, x = Straight(), torch.randn(2, 4)
    stalloc.checkpoint(model)
    model(x)
    model.three = nn.Linear(4, 4)
    own = copy.deepcopy(model)
    del own.forward
    return torch.equal(model(x), own(x)) and model(x).grad_fn is not None


def called() -> Any:
    """Arguments are taken as ever, and wrong ones refused."""
    model, x = Straight(), torch.randn(2, 4)
    expected = model(x, scale=3.0)
    done = stalloc.checkpoint(model)
    signature = str(inspect.signature(model.forward))
    same = torch.equal(model(x=x, scale=3.0), expected)
    try:
        model(x, 3.0)
    except TypeError as error:
        told = str(error)
    done.undo()
    return same, told, signature, "forward" in vars(model)


def line() -> int:
    """Where an error is, in the program's own text, from the definition on."""
    model = Failing()
    stalloc.checkpoint(model)
    try:
        model(torch.randn(2, 4))
    except ValueError as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == __file__]
    return (frames[-1].lineno or 0) - Failing.forward.__code__.co_firstlineno


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


models = (
    Straight, Held, Tied, Early, Perhaps, Counting, Handing, Later, Decorated, Inheriting, Failing,
)  # fmt: skip
found = {kind.__name__: names(kind()) for kind in models}
told = {"names": found, "exchanged": exchanged(), "called": called(), "line": line()}
del os.environ["STALLOC_CUT_FORWARD"]
print(json.dumps({**told, "unasked": names(Straight())}))
