"""Four programs whose shapes or branches change from step to step: python capped_programs.py NAME [STEPS [large]].

On the virtual GPU under a cap, and on the processor as the twin that computes: `Program.step` gives a loss, and trains.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """How large a program is."""

    width: int
    layers: int
    batch: int
    length: int  #: at most


SMALL = Size(width=64, layers=3, batch=8, length=48)  #: for the processor: what is saved has some 100 KiB a tensor
MIDDLE = Size(width=256, layers=6, batch=16, length=128)
LARGE = Size(width=512, layers=8, batch=16, length=512)  #: for the virtual GPU


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: list[Any] | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        if cache is not None:  # which grows
            if cache:
                key, value = torch.cat((cache[0], key), 2), torch.cat((cache[1], value), 2)
            cache[:] = key, value
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.ReLU(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.relu(self.first(x)))


class Mixture(nn.Module):
    """Each token goes to the expert that its own numbers name; experts are called one by one."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList([Feed(width) for _ in range(experts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(1)
            if len(places):
                mixed = mixed.index_add(0, places, expert(tokens[places]) * weights[places, None])
        return mixed.view_as(x)


class Layer(nn.Module):
    def __init__(self, width: int, feed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.feed, self.dropout = Attention(width), feed(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, cache: list[Any] | None = None) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), cache))
        return x + self.dropout(self.feed(self.norms[1](x)))


class LanguageModel(nn.Module):
    def __init__(self, size: Size, feed: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.layers = nn.ModuleList([Layer(size.width, feed) for _ in range(size.layers)])
        self.head = nn.Linear(size.width, 256)

    def forward(self, tokens: torch.Tensor, caches: list[list[Any]] | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number])
        return self.head(x)


@dataclass
class Tree:
    rows: torch.Tensor
    below: "list[Tree]" = field(default_factory=list)


class Cell(nn.Module):
    """Of a child-sum tree LSTM (Tai, Socher and Manning, 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates, self.forget = nn.Linear(2 * width, 3 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, hidden: list[torch.Tensor], cells: list[torch.Tensor]) -> Any:
        summed = torch.stack(hidden).sum(0) if hidden else torch.zeros_like(x)
        enters, leaves, new = self.gates(torch.cat((x, summed), -1)).chunk(3, -1)
        cell = enters.sigmoid() * new.tanh()
        for one, below in zip(hidden, cells, strict=True):
            cell = cell + self.forget(torch.cat((x, one), -1)).sigmoid() * below
        return leaves.sigmoid() * cell.tanh(), cell


class TreeModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(256, width), Cell(width), nn.Linear(width, 5)

    def forward(self, tree: Tree) -> torch.Tensor:
        return self.head(self.of_node(tree)[0])

    def of_node(self, tree: Tree) -> Any:
        found = [self.of_node(one) for one in tree.below]
        return self.cell(self.embedding(tree.rows), [one for one, _ in found], [one for _, one in found])


class Program:
    """One of the four, with its numbers drawn on the processor, so that twins are given the same."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.size, self.device, self.draw = name, size, device, random.Random(0)
        feed = Mixture if name == "mixture" else Feed
        model = TreeModel(size.width) if name == "tree" else LanguageModel(size, feed)
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        """Train, or generate, once."""
        return self._generate() if self.name == "generation" else self._train()

    def _tokens(self, *shape: int) -> torch.Tensor:
        return (
            torch.tensor([self.draw.randrange(256) for _ in range(shape[0])])
            .repeat(*shape[1:], 1)
            .t()
            .reshape(shape)
            .to(self.device)
        )

    def _tree(self, nodes: int) -> Tree:
        made = Tree(self._tokens(self.size.batch * 32))
        rest = nodes - 1
        while rest > 0:
            part = self.draw.randint(1, rest)
            made.below.append(self._tree(part))
            rest -= part
        return made

    def _train(self) -> torch.Tensor:
        if self.name == "tree":
            loss = self.model(self._tree(self.draw.randint(self.size.length // 2, self.size.length))).square().mean()
        else:
            length = self.draw.randint(self.size.length // 2, self.size.length)
            tokens = self._tokens(self.size.batch, length)
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _generate(self) -> torch.Tensor:
        self.model.eval()
        caches: list[list[Any]] = [[] for _ in range(self.size.layers)]
        tokens = self._tokens(self.size.batch, 8)
        made = [tokens]
        with torch.no_grad():
            for _ in range(self.draw.randint(self.size.length // 2, self.size.length)):
                tokens = self.model(tokens, caches)[:, -1:].argmax(-1)
                made.append(tokens)
        return torch.cat(made, 1)


NAMES = ("language", "mixture", "tree", "generation")

if __name__ == "__main__":
    name, steps, size = (*sys.argv[1:], *("8", "middle")[len(sys.argv) - 2 :])
    program = Program(name, LARGE if size == "large" else MIDDLE, "cuda")
    for _ in range(int(steps)):
        program.step()
