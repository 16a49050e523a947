"""Putting settings in force in a program: each technique waits for the objects that it works on.

Contract: to be called once, after torch is imported and before the program makes its model and its optimizer; what the
settings do not name is left as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalloc.techniques.appearing import when_models_appear
from stalloc.techniques.block_tape import BlockTape
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.recompute import MakeTape, wrap
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.technique_settings import RecomputeSettings, TechniqueSettings

if TYPE_CHECKING:
    from stalloc.techniques.saved_activations import SavedActivations, Watcher
    from stalloc.techniques.tiers import Tiers


@dataclass(frozen=True)
class InHost:
    """The parts of the program that are in host memory."""

    store: HostStore
    tiers: "Tiers | None" = None
    activations: "SavedActivations | None" = None

    def told(self) -> dict[str, int]:
        """How much of the program is in host memory at the most, by name."""
        told = {} if self.tiers is None else self.tiers.told()
        if self.activations is not None:
            told["offloaded_bytes"] = self.activations.left_bytes
        return {**told, "host_bytes": self.store.peak_bytes}


def apply_settings(
    settings: TechniqueSettings,
    say: Callable[[str], None],
    make_tape: Callable[[int], MakeTape] = lambda _: BlockTape,
    watcher: "Watcher | None" = None,
    folder: Path | None = None,
) -> InHost:
    """Do to the program of this process what the settings name; `say` what cannot be done. `make_tape` gives, for the
    number of a model, what makes the tapes of its recomputed blocks; `watcher` is told of saved activations; `folder`
    is for what goes to disk."""
    if settings.step_in_backward:
        from stalloc.techniques.step_in_backward import step_in_backward

        step_in_backward(say)
    if settings.activation_share < 1:
        import torch._functorch.config as partitioner

        partitioner.activation_memory_budget = settings.activation_share
    if settings.recompute.blocks:
        _recompute_as_models_appear(settings.recompute, say, make_tape)
    store, tiers, activations = HostStore(settings.host_bytes), None, None
    if settings.tiers:
        from stalloc.techniques.tiers import Tiers

        tiers = Tiers(settings.tiers, store, say, folder)  # after recomputation, which streamed blocks have inside
    if settings.activations or watcher is not None:
        from stalloc.techniques.saved_activations import SavedActivations

        activations = SavedActivations(settings.activations, store, watcher=watcher)
        activations.__enter__()  # for the rest of the program
    return InHost(store, tiers, activations)


def _recompute_as_models_appear(
    settings: RecomputeSettings, say: Callable[[str], None], make_tape: Callable[[int], MakeTape]
) -> None:
    def appeared(model: int, blocks: list[Block], module: Any) -> None:
        wanted = settings.of_model(model)
        # a fit may have found any module to be called several times, and the model itself, which goes by its class
        modules = {name or type(module).__name__: one for name, one in module.named_modules()} if wanted else {}
        known = {name: Block(name, one) for name, one in modules.items()} | {block.name: block for block in blocks}
        found = {name: known[name] for name in wanted if name in known}
        if strange := [name for name, one in wanted.items() if name not in found or found[name].kind != one.kind]:
            say(
                f"the program has no block {strange[0]} of class {wanted[strange[0]].kind} any more: its blocks stay "
                "as they are. Fit it anew with stalloc fit."
            )
            return
        kept = [frozenset(wanted[name].keep) for name in found]
        keeping = [lambda position, name, kept=one: (position, name) in kept for one in kept]
        done = wrap(list(found.values()), keeping, make_tape(model))
        for reason in list(done.left.values())[:1]:
            say(f"{len(done.left)} of {len(found)} blocks stay as they are: {reason}.")

    when_models_appear(appeared)
