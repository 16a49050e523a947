"""Blocks that a program itself puts through torch's checkpoint and that change what they hold, as they are and
recomputed.

Their forward pass runs twice by the program's own will, and changes twice what it changes. Prints what became of each
as JSON, as `recomputation.py` does.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import recomputation
import torch
from changing_blocks import Codebook, observed
from recomputation import WIDTH, Layer, Stack, counted, mixed_batch_norm, twice_before
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Call = Callable[[Any, torch.Tensor], torch.Tensor]


class Checkpointed(Stack):
    """Calls its layers in some way, or one of every few of them, and the others as they are."""

    def __init__(self, layers: list[nn.Module], call: Call, *, every: int = 1) -> None:
        super().__init__(layers)
        self.call, self.every = call, every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.call(layer, x) if number % self.every == 0 else layer(x)
        return x.square().mean()


class Segmented(Stack):
    """All layers but the last go through two checkpoints of torch's own way to cut a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential([*self.layers], 2, x, use_reentrant=False).square().mean()


def unlike_reentrant(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def reentrant(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


def to_the_host(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Hooks of another kind lie between the checkpoint and the layer."""

    def saved_elsewhere(y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layer(y)  # type: ignore[no-any-return]

    return checkpoint(saved_elsewhere, x, use_reentrant=False)  # type: ignore[no-any-return]


def one_in_another(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: checkpoint(layer, y, use_reentrant=False) * 2, x, use_reentrant=False)  # type: ignore


def batch() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, WIDTH).requires_grad_(),)


def norm() -> dict[str, nn.Module]:
    return {"norm": nn.BatchNorm1d(2 * WIDTH)}


MIDDLES: dict[str, tuple[Any, Callable[[], dict[str, nn.Module]]]] = {
    "norm": (mixed_batch_norm, norm),
    "codebook": (lambda layer, x: layer.parts["book"](x), lambda: {"book": Codebook(through_data=False)}),
    "observer": (observed, dict),
    "count": (counted, dict),
}


def layers(kind: str) -> list[nn.Module]:
    middle, parts = MIDDLES[kind]
    return [Layer(middle, **parts()) for _ in range(4)]


def called(kind: str, call: Call, every: int = 1) -> Any:
    return lambda: (Checkpointed(layers(kind), call, every=every), batch)


def within_another() -> Any:
    """A block that other blocks call too, in a checkpoint."""
    found: list[Any] = layers("norm")

    def middle(layer: Any, x: torch.Tensor) -> torch.Tensor:
        shared = unlike_reentrant(found[0], x[:, :WIDTH])
        return mixed_batch_norm(layer, x) + torch.cat((shared, shared), 1)

    for layer in found[1:]:
        layer.middle = middle
    return Stack(found), batch


def composed() -> Any:
    """Torch's other way to ask for a checkpoint: hooks around a module."""
    model = Stack(layers("norm"))
    for layer in model.layers:
        composable(layer)
    return model, batch


recomputation.CASES = {
    **{f"{kind}": called(kind, unlike_reentrant) for kind in MIDDLES},
    **{f"{kind}_reentrant": called(kind, reentrant) for kind in MIDDLES},
    "every_other": called("norm", unlike_reentrant, 2),
    "every_other_reentrant": called("norm", reentrant, 2),
    "to_the_host": called("observer", to_the_host),
    "one_in_another": called("norm", one_in_another),
    "twice": twice_before(called("norm", unlike_reentrant)),
    "segmented": lambda: (Segmented(layers("norm")), batch),
    "composed": composed,
    "within_another": within_another,
}


if __name__ == "__main__":
    cases = sys.argv[2:] or recomputation.CASES
    print(json.dumps({case: recomputation.compared(case, int(sys.argv[1])) for case in cases}))
