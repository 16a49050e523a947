"""What is done to a program so that it needs less memory: the settings of all techniques, as data.

Contract: settings hold no objects of the program, so they can be written to a file, and whatever such a file says,
settings can only choose among the techniques that are here. The default does nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from stalloc.techniques.activation_settings import ActivationSettings, activations_from_json
from stalloc.techniques.recompute_settings import RecomputeSettings, settings_from_json
from stalloc.techniques.tier_settings import TierSettings, tiers_from_json


@dataclass(frozen=True)
class TechniqueSettings:
    """The settings of all techniques, one field for each."""

    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    step_in_backward: bool = False  #: whether every optimizer makes its step in the backward pass
    activation_share: float = 1.0  #: share of what torch.compile's code would save that its partitioner may save
    tiers: TierSettings = field(default_factory=TierSettings)
    activations: ActivationSettings = field(default_factory=ActivationSettings)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that may be used at the most; 0: none is used."""
        return max(self.tiers.host_bytes if self.tiers else 0, self.activations.host_bytes if self.activations else 0)

    def as_json(self) -> dict[str, Any]:
        """Plain values (JSON) for a file."""
        return {
            "recompute": self.recompute.as_json(),
            "step_in_backward": self.step_in_backward,
            "activation_share": self.activation_share,
            "tiers": self.tiers.as_json(),
            "activations": self.activations.as_json(),
        }

    @classmethod
    def from_json(cls, told: Any) -> "TechniqueSettings":
        """The settings that `as_json` wrote; a later field has its default. Raises ValueError for anything else."""
        default = cls().as_json()
        if not isinstance(told, dict) or "recompute" not in told:
            raise ValueError("its settings are damaged")
        if unknown := sorted(map(str, set(told) - set(default))):
            raise ValueError(f"it has settings that this stalloc does not know, {unknown[0][:40]}")
        told = default | told
        if type(told["step_in_backward"]) is not bool:
            raise ValueError("where optimizers make their steps is neither true nor false")
        share = told["activation_share"]
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise ValueError("what compiled code saves is no share")
        recompute, tiers = settings_from_json(told["recompute"]), tiers_from_json(told["tiers"])
        activations = activations_from_json(told["activations"])
        return cls(recompute, told["step_in_backward"], float(share), tiers, activations)
