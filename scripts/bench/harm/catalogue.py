"""Which programs there are: our own of scripts/bench/harm_programs, those of tests/programs/real, examples."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OWN, REAL, EXAMPLES = Path("scripts/bench/harm_programs"), Path("tests/programs/real"), Path("examples")


@dataclass(frozen=True)
class Program:
    """One program, as Python is told to run it from the checkout's folder."""

    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    is_cupy: bool = False
    num_devices: int = 1
    is_quick: bool = False  #: one of the choice of --quick

    @property
    def sources(self) -> list[Path]:
        """The files whose change makes kept results void."""
        beside = sorted((ROOT / self.script.parent).glob("*.py"))
        shared = [path for path in beside if path.name in ("models.py", "steps.py", "transformer_block.py")]
        return [ROOT / self.script, *shared]


_OWN = {
    "lasting": "snapshots ema_copy best_weights leaking_list hooks_keep_activations replay_buffer predictions_kept",
    "lengths": "three_lengths random_lengths odd_evaluation last_batch curriculum buckets multi_scale "
    "labels_of_any_number",
    "failures": "forward_raises out_of_memory_retry empty_cache bad_gradients",
    "changing": "growing_model optimizer_swapped frozen_then_thawed pruned adapters sweep federated "
    "blocks_chosen continual",
    "phases": "accumulation checkpoint_saved rollout_and_training training_then_inference inference_only "
    "inference_of_any_length gan validation_each_epoch greedy_generation beam_search",
    "streams": "pinned_loader large_prefetch weights_streamed captured_step two_threads two_gpus busy_neighbour "
    "data_parallel",
    "gradients": "mixed_precision double_backward recomputed sparse_embeddings inner_loop recurrent convolutions "
    "fourier stepped_in_hooks",
    "methods": "accumulation_changes experts_by_data generation_between actor_and_critic backward_raises second_order "
    "gradients_by_sample resized_progressively recomputed_at_times averaged_weights distilled",
    "recipes": "recomputing_toggled feature_hooks offloaded_by_hand ragged_accumulation refilled_buffer",
    "branching": "adaptive_solver early_exits lazy_penalty adversarial folds feedback imagined several_tasks",
    "arrays": "elementwise waves stencil random_sizes two_shapes two_streams growing_table blocks_freed",
}
_QUICK = (
    *("snapshots", "best_weights", "random_lengths", "odd_evaluation", "forward_raises", "growing_model"),
    *("training_then_inference", "gan", "two_gpus", "elementwise"),
)
_OTHERS = (
    Program("resnet", REAL / "resnet.py", ("20",)),
    Program("diffusion_unet", REAL / "diffusion_unet.py", ("20",)),
    Program("fsdp2", REAL / "fsdp2.py", ("30",)),
    Program("fsdp2_two_lengths", REAL / "fsdp2.py", ("30", "512,384")),
    Program("pipeline", REAL / "pipeline.py", ("1F1B", "20")),
    Program("pipeline_interleaved", REAL / "pipeline.py", ("Interleaved1F1B", "20")),
    Program("train_gpt_7b", EXAMPLES / "train_gpt.py", ("--size", "7b", "--steps", "12")),
    Program("train_gpt_124m", EXAMPLES / "train_gpt.py", ("--size", "124m", "--batch", "4", "--accumulate", "2")),
    Program("cupy_fft", REAL / "cupy_fft.py", ("30",), is_cupy=True),
)
_WITH_TRANSFORMERS = (
    Program("llama", REAL / "llama.py", ("15",)),
    Program("mixture_of_experts", REAL / "mixture_of_experts.py", ("15",)),
)


def programs() -> list[Program]:
    """All of them, those that need Hugging Face's library only where it is installed."""
    found = []
    for file, names in _OWN.items():
        for name in names.split():
            devices = 2 if name in ("two_gpus", "data_parallel") else 1
            found.append(Program(name, OWN / f"{file}.py", (name,), file == "arrays", devices, name in _QUICK))
    found += _OTHERS
    if importlib.util.find_spec("transformers") is not None:
        found += _WITH_TRANSFORMERS
    return sorted(found, key=lambda program: program.is_cupy)
