"""One rank of the training of a language model in a pipeline: pipeline_rank.py MODEL CONFIGURATION [--rank N] …

The configuration is made of letters: N nothing, R every layer is recomputed, V a virtual pipeline (two stages a rank),
Z ZeRO: one shard of the optimizer a rank, O its states are the processor's. The other ranks are not there (a fake
process group): what they would send is memory like any other. Knows nothing of stalloc.
"""

import argparse

import torch
import torch.distributed as dist
from decoders import SHAPES, FeedForward, Layer, RoutedExperts, Stage, mean_loss
from mixed_precision import MixedPrecision
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", choices=SHAPES)
parser.add_argument("configuration", help="letters of N R V Z O")
parser.add_argument("--rank", type=int, default=0, help="in the pipeline")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pipeline", type=int, default=4, help="ranks of the pipeline")
parser.add_argument("--data", type=int, default=8, help="pipelines side by side")
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--sequences", type=int, help="of a microbatch")
parser.add_argument("--layers", type=int, help="of the whole model")
parser.add_argument("--length", type=int, help="tokens of a sequence")
parser.add_argument("--skew", type=float, default=0.3, help="of the experts")
args = parser.parse_args()
shape = SHAPES[args.model]
layers, length, sequences = args.layers or shape.layers, args.length or shape.length, args.sequences or shape.sequences
recompute, is_virtual = "R" in args.configuration, "V" in args.configuration
device = torch.device("cuda:0")
torch.manual_seed(0)
dist.init_process_group("fake", rank=args.rank, world_size=args.pipeline * args.data, store=FakeStore())
mesh = init_device_mesh("cuda", (args.data, args.pipeline), mesh_dim_names=("data", "pipeline"))
torch.set_default_dtype(torch.bfloat16)

num_stages = args.pipeline * (2 if is_virtual else 1)
of_stage = layers // num_stages
numbers = range(args.rank, num_stages, args.pipeline)


def mixer(number: int) -> torch.nn.Module:
    return RoutedExperts(shape, number, args.skew) if shape.experts else FeedForward(shape, shape.hidden)


stages = []
for number in numbers:
    is_first, is_last = number == 0, number == num_stages - 1
    with device:
        made = [Layer(shape, mixer(of_stage * number + row)) for row in range(of_stage)]
        module = Stage(shape, made, is_first=is_first, is_last=is_last, recompute=recompute)
    between = torch.empty(sequences, length, shape.width, device=device, requires_grad=True)
    tokens = torch.zeros(sequences, length, dtype=torch.long, device=device) if is_first else between
    result = torch.empty(sequences, length, shape.vocabulary, device=device) if is_last else between
    group = mesh.get_group("pipeline")
    stages.append(PipelineStage(module, number, num_stages, device, (tokens,), (result,), group=group))
    del between, tokens, result
parameters = [one for stage in stages for one in stage.submod.parameters()]
choices = {"shard": "Z" in args.configuration, "host": "O" in args.configuration}
state = MixedPrecision(parameters, mesh.get_group("data"), **choices)
if is_virtual:
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=args.microbatches, loss_fn=mean_loss)
else:
    schedule = Schedule1F1B(stages[0], n_microbatches=args.microbatches, loss_fn=mean_loss)
print(f"{args.model} {args.configuration}, rank {args.rank}: {state.values.numel() / 1e6:,.0f} million parameters")
for _ in range(args.steps):
    batch = torch.randint(shape.vocabulary, (sequences * args.microbatches, length)).to(device)
    given = (batch,) if 0 in numbers else ()
    labels = {"target": batch} if num_stages - 1 in numbers else {}
    try:
        schedule.step(*given, **labels, return_outputs=False)
    except RuntimeError as error:  # what a stage raises is wrapped
        raise error.__cause__ or error from None
    state.step()
dist.destroy_process_group()
