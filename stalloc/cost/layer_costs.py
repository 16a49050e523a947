"""What a layer weighs, moves and takes, and what a copy over a link takes: what schedules of layers are made of."""

from dataclasses import dataclass

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START


@dataclass(frozen=True)
class LayerCost:
    """One layer, or several in a row."""

    parameter_bytes: int
    saved_bytes: int  #: activations that its forward pass leaves for its backward pass
    boundary_bytes: int  #: what it hands to the next layer
    forward_seconds: float
    backward_seconds: float
    forward_work_bytes: int = 0  #: the most that its forward pass has at once of what it makes, beyond what it saves
    backward_work_bytes: int = 0  #: the same of its backward pass, beyond the gradients of its parameters


@dataclass(frozen=True)
class LinkCost:
    """Copies over one link."""

    bytes_per_second: float

    @property
    def rate(self) -> float:
        """Bytes a second of a copy that is under way."""
        return LINK_SHARE * self.bytes_per_second

    def seconds(self, num_bytes: int) -> float:
        """Seconds of one copy of `num_bytes`; 0 for no bytes."""
        return LINK_START + num_bytes / self.rate if num_bytes else 0.0
