"""Llama 3 8B, sharded over four GPUs, to the loss of its first step, where a recording of torchtitan ran out of memory.

python llama3_fsdp.py: writes llama3_fsdp.pickle, of rank 0. What call sites and sizes tell of the program: parameters
of 16 bits, one FSDP unit a layer, one for the embedding, one for the last norm with the head, which stays
gathered; one sequence of 8,192 tokens; every second layer is checkpointed; attention by cuDNN with the keys repeated;
the table of rotations is made complex and cast to 16 bits with the rest, which leaves its real part. The process group
is fake: it moves nothing and takes no memory, as the recording does not show what NCCL takes either.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

NUM_RANKS, NUM_LAYERS, SEQUENCE = 4, 32, 8192
VOCABULARY, WIDTH, HIDDEN, NUM_HEADS, NUM_KEY_HEADS = 128_256, 4096, 14_336, 32, 8
HEAD = WIDTH // NUM_HEADS


def rotated(queries, keys, turns):
    wide_queries = torch.view_as_complex(queries.float().reshape(*queries.shape[:-1], -1, 2))
    wide_keys = torch.view_as_complex(keys.float().reshape(*keys.shape[:-1], -1, 2))
    turns = turns[:SEQUENCE].view(1, SEQUENCE, 1, -1)
    turned_queries = torch.view_as_real(wide_queries * turns).flatten(3)
    turned_keys = torch.view_as_real(wide_keys * turns).flatten(3)
    return turned_queries.type_as(queries), turned_keys.type_as(keys)


def repeated(heads):
    batch, length, num, size = heads.shape
    times = NUM_HEADS // num
    return heads[:, :, :, None, :].expand(batch, length, num, times, size).reshape(batch, length, num * times, size)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, NUM_KEY_HEADS * HEAD, bias=False)
        self.values = nn.Linear(WIDTH, NUM_KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries = queries.view(batch, length, -1, HEAD)
        keys = keys.view(batch, length, -1, HEAD)
        values = values.view(batch, length, -1, HEAD)
        queries, keys = rotated(queries, keys, turns)
        more_keys = repeated(keys)
        more_values = repeated(values)
        queries = queries.transpose(1, 2)
        keys = more_keys.transpose(1, 2)
        values = more_values.transpose(1, 2)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        attended = attended.transpose(1, 2).contiguous()
        attended = attended.view(batch, length, -1)
        return self.out(attended)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.feed_forward_norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.feed_forward_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("turns", torch.empty(SEQUENCE, HEAD // 2, dtype=torch.complex64), persistent=False)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(NUM_LAYERS)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        h = self.norm(h)
        return self.head(h)


def main():
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    with torch.device("meta"):
        model = Llama().to(torch.bfloat16)
    for i in range(1, NUM_LAYERS, 2):
        model.layers[str(i)] = checkpoint_wrapper(model.layers[str(i)], preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.embedding, mp_policy=policy, reshard_after_forward=True)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    fully_shard([model.norm, model.head], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    batch = torch.zeros(2, 1, SEQUENCE, dtype=torch.long)
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    with contextlib.suppress(torch.OutOfMemoryError):
        tokens, labels = batch[0].cuda(), batch[1].cuda()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
    torch.cuda.memory._dump_snapshot("llama3_fsdp.pickle")


main()
