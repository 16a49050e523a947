"""What is measured: models, configurations, ranks, and the command line of each.

Letters of a configuration: N nothing, R recomputation of every layer, V a virtual pipeline of two stages a rank, Z the
optimizer sharded over eight ranks (ZeRO), O the optimizer offloaded to the processor.
"""

from dataclasses import dataclass
from pathlib import Path

from harm.catalogue import Program

DENSE, MIXTURES = ("gpt2", "llama"), ("qwen", "mixtral")
GROUPS = {"dense": DENSE, "moe": MIXTURES} | {model: (model,) for model in (*DENSE, *MIXTURES)}  #: what --only takes
CONFIGURATIONS = ("N", "R", "V", "VR", "ZR", "ZOR")
PIPELINE_RANKS, MICROBATCHES, STAGES_OF_A_RANK = 4, 8, 2
RANKS = (0, PIPELINE_RANKS - 1)  #: the first holds the activations of most microbatches, the last the logits
DATA_RANKS = 8
SCRIPT = Path("scripts/bench/paper_programs/pipeline_rank.py")


@dataclass(frozen=True)
class Cell:
    """One rank of one configuration of one model."""

    model: str
    configuration: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.configuration} {self.rank}"

    def program(self, steps: int, options: tuple[str, ...] = ()) -> Program:
        """Training for so many steps."""
        more = ("--rank", str(self.rank), "--steps", str(steps), *options)
        return Program(self.name, SCRIPT, (self.model, self.configuration, *more))


def bubble(configuration: str) -> float:
    """Idle time of a rank, by the time that it works: (ranks - 1) / (microbatches x stages of a rank).

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC '21.
    """
    return (PIPELINE_RANKS - 1) / (MICROBATCHES * (STAGES_OF_A_RANK if "V" in configuration else 1))
