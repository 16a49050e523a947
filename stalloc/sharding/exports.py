"""A way to shard, as other frameworks take it: FSDP2 code, a DeepSpeed JSON, an accelerate YAML, a torchtitan TOML.

Contract: what a framework has nothing for is a BadInputError that says what. Each text is complete where the framework
needs no more than how to shard; batch sizes and optimizers stay the program's. Sources: the configuration references
of DeepSpeed ("ZeRO Optimizations"), accelerate ("FSDP2"), torchtitan (`parallelism`), PyTorch (`fully_shard`).
"""

import json
from collections.abc import Sequence

from stalloc.errors import BadInputError
from stalloc.techniques.shard_settings import Layout

_CODE = '''\
"""Shard a model as stalloc foresaw it: `model = shard(model)` after it is made, before its optimizer is."""

{partial}from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
{checkpoint}
BLOCKS = {blocks!r}


def shard(model, device_type="cuda"):
    mesh = init_device_mesh(device_type, {shape!r}{names})
    for name in BLOCKS:
        {body}
    return fully_shard(model, mesh=mesh)
'''
_RECOMPUTED = """block = model.get_submodule(name)
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, reshard_after_forward={held!r})"""


def exported(form: str, layout: Layout, num_ranks: int, blocks: Sequence[str], *, recompute: bool, kind: str) -> str:
    """The text. `blocks`: names within the model of what is gathered as one; `kind`: their class."""
    if form == "fsdp2":
        return _fsdp2(layout, num_ranks, blocks, recompute)
    if form == "accelerate":
        return _accelerate(layout, num_ranks, recompute, kind)
    return (_deepspeed if form == "deepspeed" else _torchtitan)(layout, num_ranks, recompute)


def _refused(form: str, layout: Layout, num_ranks: int, why: str, recompute: bool = False) -> BadInputError:
    name = layout.name(num_ranks) + ("+blocks" if recompute else "")
    return BadInputError(f"{form} has nothing for {name}: {why}.")


def _fsdp2(layout: Layout, num_ranks: int, blocks: Sequence[str], recompute: bool) -> str:
    if layout.executor != "fully_shard" or layout.divides_optimizer:
        raise _refused("fsdp2", layout, num_ranks, "fully_shard divides parameters, gradients and state together")
    whole = layout.state == num_ranks
    shape = (num_ranks,) if whole else (num_ranks // layout.state, layout.state)
    names = "" if whole else ', mesh_dim_names=("replicate", "shard")'
    held = layout.reshard_after_forward
    body = f"fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward={held!r})"
    return _CODE.format(
        partial="from functools import partial\n\n" if recompute else "",
        checkpoint="from torch.utils.checkpoint import checkpoint\n" if recompute else "",
        blocks=list(blocks),
        shape=shape,
        names=names,
        body=_RECOMPUTED.format(held=held) if recompute else body,
    )


def _deepspeed(layout: Layout, num_ranks: int, recompute: bool) -> str:
    n = num_ranks
    if recompute:
        raise _refused("deepspeed", layout, n, "recomputing is not in its file", recompute)
    stages = {(1, 1, 1): 0, (1, 1, n): 1, (1, n, n): 2, (n, n, n): 3}
    factors = (layout.parameters, layout.gradients, layout.state)
    zero: dict[str, object] = {"overlap_comm": True}
    if factors in stages:
        zero["stage"] = stages[factors]
    elif layout.gradients == layout.state == n:
        zero |= {"stage": 3, "zero_hpz_partition_size": layout.parameters}
    else:
        raise _refused("deepspeed", layout, n, "it has stages and zero_hpz_partition_size, and MiCS no more")
    return json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, indent=2) + "\n"


def _accelerate(layout: Layout, num_ranks: int, recompute: bool, kind: str) -> str:
    if layout.executor == "ddp" and recompute:
        raise _refused("accelerate", layout, num_ranks, "its file recomputes blocks with FSDP2 only", recompute)
    if layout.executor == "ddp" and layout.state == 1:
        return f"distributed_type: MULTI_GPU\nnum_processes: {num_ranks}\n"
    whole = layout.gradients == layout.state == num_ranks
    if layout.executor != "fully_shard" or not whole or 1 < layout.parameters < num_ranks:
        raise _refused("accelerate", layout, num_ranks, "its file has FSDP2 over all ranks, or DDP")
    lines = (
        "distributed_type: FSDP",
        f"num_processes: {num_ranks}",
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(layout.parameters > 1).lower()}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_transformer_layer_cls_to_wrap: {kind}",
        f"  fsdp_activation_checkpointing: {str(recompute).lower()}",
        "  fsdp_state_dict_type: FULL_STATE_DICT",
    )
    return "\n".join(lines) + "\n"


def _torchtitan(layout: Layout, num_ranks: int, recompute: bool) -> str:
    if layout.divides_optimizer:
        raise _refused("torchtitan", layout, num_ranks, "it has DDP, FSDP2 and HSDP")
    if 1 < layout.parameters < layout.state:
        raise _refused("torchtitan", layout, num_ranks, "fsdp_reshard_after_forward is always or never")
    parallelism: dict[str, int | str] = {
        "data_parallel_replicate_degree": num_ranks // layout.state,
        "data_parallel_shard_degree": layout.state,
        "fsdp_reshard_after_forward": "always" if layout.parameters > 1 else "never",
    }
    words = " ".join(f"--parallelism.{name} {value}" for name, value in parallelism.items())
    lines = (
        "# --job.config_file for torchtitan up to 0.2; later ones take no file, but these words:",
        f"# {words} activation-checkpoint:{'full' if recompute else 'none'}",
        "[parallelism]",
        *(f"{name} = {json.dumps(value)}" for name, value in parallelism.items()),
        "",
        "[activation_checkpoint]",
        f'mode = "{"full" if recompute else "none"}"',
    )
    return "\n".join(lines) + "\n"
