"""Programs with a model, each of which leaves recordings: python train.py NAME FOLDER, on a virtual GPU."""

import gzip
import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from model import Model
from recorder import Recorder, renumbered
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule


def batch_of(rows: int, length: int, device: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of a batch, and those that follow."""
    tokens = torch.ones(rows, length + 1, dtype=torch.int64).to(f"cuda:{device}")
    return tokens[:, :-1], tokens[:, 1:]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    """Forward, backward, update."""
    scores = model(tokens)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def training(recorder: Recorder) -> None:
    """Seven like steps, recorded from the first allocation."""
    recorder.begin()
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(7):
        train_step(model, optimizer, *batch_of(4, 128))
    snapshot = recorder.save("training")
    from torch.cuda._memory_viz import trace_plot

    recorder.write("page.html.gz", trace_plot(snapshot).encode())


def step(recorder: Recorder) -> None:
    """One step of many, whose optimizer has its state already."""
    model = Model(depth=6).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        if number == 2:
            recorder.begin()
        train_step(model, optimizer, *batch_of(8, 256))
    recorder.save("step")


def forward(recorder: Recorder) -> None:
    """Layers alike, forward only, and nothing is thrown away: they repeat, and no step does."""
    recorder.begin()
    model = Model(depth=24).cuda()
    scores = model(batch_of(2, 256)[0])
    recorder.save("forward")
    del scores


def optimizer_step(recorder: Recorder) -> None:
    """The first update, which makes the optimizer's state one layer after the other."""
    model = Model(depth=12).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    recorder.begin()
    optimizer.step()
    recorder.save("optimizer_step")


def logged_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    """A step that computes, to be logged, how sure the model is of its scores."""
    scores = model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, targets.flatten())
    chances = scores.detach().softmax(dim=-1)
    entropy = -(chances * chances.log()).sum()
    del scores, chances
    (loss + 0 * entropy).backward()
    optimizer.step()
    optimizer.zero_grad()


def out_of_memory(recorder: Recorder) -> None:
    """Sequences of ever other lengths, batches copied on a stream of their own; a long one no longer fits."""
    rng = random.Random(6)
    recorder.begin()
    model = Model(vocabulary=16384, width=512, depth=4, heads=8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    copies = torch.cuda.Stream()
    for number in range(6):
        length = 1408 if number == 5 else rng.randrange(256, 1200)
        with torch.cuda.stream(copies):
            batch = batch_of(4, length)
        torch.cuda.current_stream().wait_stream(copies)
        for part in batch:
            part.record_stream(torch.cuda.current_stream())
        try:
            logged_step(model, optimizer, *batch)
        except torch.OutOfMemoryError as error:
            recorder.save("out_of_memory")
            recorder.save_error("out_of_memory", error)
            return
    print(f"no error: {torch.cuda.max_memory_reserved() >> 20} MiB were enough", file=sys.stderr)
    sys.exit(1)


def ranks(recorder: Recorder) -> None:
    """Two stages of a pipeline as two ranks see them: one has the embedding, the other the scores."""
    for rank in range(2):
        recorder.begin()
        whole = Model(depth=4)
        layers = whole.blocks[2 * rank : 2 * rank + 2]
        stage = (nn.Sequential(whole.embed, *layers) if rank == 0 else nn.Sequential(*layers, whole.head)).cuda()
        optimizer = torch.optim.AdamW(stage.parameters())
        for _ in range(3):
            tokens = batch_of(4, 128)[0]
            made = stage(tokens if rank == 0 else torch.ones(4, 128, 256, device="cuda"))
            made.backward(torch.ones_like(made))
            optimizer.step()
            optimizer.zero_grad()
        recorder.save(f"rank{rank}")
        del whole, layers, stage, optimizer, tokens, made
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.empty_cache()


def profiled(recorder: Recorder) -> None:
    """Five steps under torch's profiler, after the model and the optimizer's state were made."""
    model = Model(depth=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train_step(model, optimizer, *batch_of(4, 128))

    def write(prof: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace, timeline = Path(folder) / "trace.json", Path(folder) / "timeline.raw.json.gz"
            prof.export_chrome_trace(str(trace))
            recorder.write("profile.json.gz", json.dumps(renumbered(json.loads(trace.read_text()))).encode())
            prof.export_memory_timeline(str(timeline), device="cuda:0")
            recorder.write("memory_timeline.json.gz", gzip.decompress(timeline.read_bytes()))

    what = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "record_shapes": True, "with_stack": True}
    with profile(**what, schedule=schedule(wait=0, warmup=0, active=5, repeat=1), on_trace_ready=write) as prof:
        for _ in range(5):
            train_step(model, optimizer, *batch_of(4, 128))
            prof.step()


if __name__ == "__main__":
    globals()[sys.argv[1]](Recorder(Path(sys.argv[2])))
