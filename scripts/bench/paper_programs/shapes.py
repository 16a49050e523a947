"""The models that are trained, by their published shapes; what is scaled says so."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder; sequences and microbatches are what one step of a rank works on."""

    layers: int
    width: int
    heads: int
    hidden: int  #: of a feed-forward network, or of one expert
    vocabulary: int
    length: int  #: tokens of a sequence
    sequences: int  #: of a microbatch
    is_gpt: bool = False  #: layer norms, biases, GELU and dropout, where the others have RMS norms and SwiGLU
    experts: int = 0  #: 0: the model is dense
    expert_ranks: int = 1  #: that the experts of a layer are spread over; each gets the tokens of all of them
    chosen: int = 0  #: experts that each token goes to
    shared: int = 0  #: hidden width of the expert that every token goes to


SHAPES = {
    "gpt2": Shape(  # GPT-2 medium, 345M
        layers=24, width=1024, heads=16, hidden=4096, vocabulary=50304, length=1024, sequences=4, is_gpt=True
    ),
    "llama": Shape(layers=32, width=4096, heads=32, hidden=11008, vocabulary=32000, length=2048, sequences=1),
    "qwen": Shape(  # Qwen1.5-MoE-A2.7B with two thirds of its layers and four experts more
        layers=16,
        width=2048,
        heads=16,
        hidden=1408,
        vocabulary=151936,
        length=1024,
        sequences=2,
        experts=64,
        expert_ranks=8,
        chosen=4,
        shared=5632,
    ),
    "mixtral": Shape(  # Mixtral 8x7B with half of its layers
        layers=16,
        width=4096,
        heads=32,
        hidden=14336,
        vocabulary=32000,
        length=2048,
        sequences=1,
        experts=8,
        expert_ranks=4,
        chosen=2,
    ),
}
"""Llama is Llama-2 7B with sequences of 2,048 tokens."""
