"""Scalars a step for trackers of experiments, written by the real libraries; skipped where one is not installed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("cuda_torch")

#: under stalloc on the virtual GPU, steps that hold 8 MiB and reserve more; {work} is done in each, with `step`
STEPS = """
import json, sys
folder = sys.argv[1]
import stalloc
stalloc.install(device="virtual")
import torch
{before}
kept = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
for step in range(6):
    passing = [torch.empty((3 + i) << 20, dtype=torch.uint8, device="cuda") for i in range(4)]
    del passing
    stalloc.step()
    {work}
{after}
"""


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def ran(run_checks: Any, folder: Path, work: str, before: str = "", after: str = "") -> Any:
    return run_checks(STEPS.format(work=work, before=before, after=after), str(folder))


def check(scalars: dict[str, float]) -> None:
    """What is true of the steps above, whoever wrote it down."""
    assert scalars["stalloc/gpu0/allocated_bytes"] == 8 * MIB
    assert scalars["stalloc/gpu0/reserved_bytes"] >= 26 * MIB
    assert 0 <= scalars["stalloc/gpu0/fragmentation"] < 1
    assert 0 <= scalars.get("stalloc/gpu0/hit_rate", 0) <= 1


def test_logging_has_a_line_and_the_figures(run_checks: Any, tmp_path: Path) -> None:
    before = """
import logging
from stalloc.integrations.log_lines import log_step
kept_records = []
class Keep(logging.Handler):
    def emit(self, record): kept_records.append((record.getMessage(), record.stalloc))
logging.getLogger("stalloc.memory").addHandler(Keep())
log_step(-1)
logging.getLogger("stalloc.memory").setLevel(logging.INFO)
"""
    after = """
print(json.dumps([kept_records, stalloc.memory_scalars(), stalloc.statistics()[0].fragmentation]))
"""
    records, scalars, fragmentation = ran(run_checks, tmp_path, "log_step(step)", before, after)
    assert len(records) == 6
    assert records[5][0].startswith("step 5, gpu0: allocated 8.00 MiB, reserved ")
    assert {f"stalloc/gpu0/{name}": value for name, value in records[5][1].items()} == scalars
    assert scalars["stalloc/gpu0/fragmentation"] == fragmentation
    check(scalars)


def test_without_stalloc_the_figures_are_torch_s(run_checks: Any) -> None:
    source = """
import json
import stalloc
from stalloc.device import activate
activate("virtual")
before = stalloc.memory_scalars()
import torch
kept = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps([before, stalloc.memory_scalars(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
"""
    before, scalars, allocated, reserved = run_checks(source)
    assert before == {}
    assert scalars["stalloc/gpu0/allocated_bytes"] == allocated == 8 * MIB
    assert scalars["stalloc/gpu0/reserved_bytes"] == reserved
    assert "stalloc/gpu0/hit_rate" not in scalars


@needs("tensorboard")
def test_tensorboard_reads_back_what_was_written(run_checks: Any, tmp_path: Path) -> None:
    before = """
from torch.utils.tensorboard import SummaryWriter
from stalloc.integrations.tensorboard import write_scalars
writer = SummaryWriter(folder)
"""
    after = """
writer.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(folder)
read.Reload()
print(json.dumps({tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}))
"""
    written = ran(run_checks, tmp_path, "write_scalars(writer, step)", before, after)
    assert all([step for step, _ in values][-1] == 5 for values in written.values())
    check({tag: values[-1][1] for tag, values in written.items()})


@needs("wandb")
def test_weights_and_biases_keeps_them_offline(run_checks: Any, tmp_path: Path) -> None:
    before = """
import wandb
from stalloc.integrations.weights_and_biases import log_scalars
run = wandb.init(mode="offline", dir=folder, project="p", settings=wandb.Settings(silent=True))
"""
    after = """
summary = {name: value for name, value in dict(run.summary).items() if name.startswith("stalloc/")}
run.finish()
print(json.dumps(summary))
"""
    check(ran(run_checks, tmp_path, "log_scalars(run, step)", before, after))
    assert list(tmp_path.glob("wandb/offline-run-*"))


@needs("lightning")
@pytest.mark.slow  # its imports take seconds
def test_lightning_hands_them_to_its_logger(run_checks: Any, tmp_path: Path) -> None:
    source = """
import json, sys
import stalloc
stalloc.install(device="virtual")
import torch
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from stalloc.integrations.lightning import MemoryScalars

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
    def training_step(self, batch, number):
        return self.layer(batch.cuda()).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.layer.parameters())
    def on_fit_start(self):
        self.layer.cuda()

data = torch.utils.data.DataLoader(torch.zeros(8, 512), batch_size=2)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=2, logger=CSVLogger(sys.argv[1]),
                     callbacks=[MemoryScalars()], enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(Model(), data)
import csv, glob
(file,) = glob.glob(sys.argv[1] + "/**/metrics.csv", recursive=True)
rows = [row for row in csv.DictReader(open(file)) if row.get("stalloc/gpu0/allocated_bytes")]
print(json.dumps([[int(row["step"]), float(row["stalloc/gpu0/allocated_bytes"])] for row in rows]))
"""
    told = run_checks(source, str(tmp_path))
    assert [step for step, _ in told] == [2, 4]
    assert all(allocated >= 4 * 512 * 512 for _, allocated in told)


@needs("transformers", "accelerate")
@pytest.mark.slow  # its imports take seconds
def test_the_trainer_of_hugging_face_has_them_in_its_history(run_checks: Any, tmp_path: Path) -> None:
    source = """
import json, sys
import stalloc
stalloc.install(device="virtual")
import torch
from transformers import Trainer, TrainingArguments
from stalloc.integrations.hugging_face import MemoryScalars

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
    def forward(self, x):
        return {"loss": self.layer(x).sum()}

data = [{"x": torch.zeros(512)} for _ in range(8)]
arguments = TrainingArguments(sys.argv[1], max_steps=4, logging_steps=2, per_device_train_batch_size=2,
                              report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.add_callback(MemoryScalars(trainer))
trainer.train()
rows = [row for row in trainer.state.log_history if "stalloc/gpu0/allocated_bytes" in row]
print(json.dumps([[row["step"], row["stalloc/gpu0/allocated_bytes"]] for row in rows]))
"""
    told = run_checks(source, str(tmp_path))
    assert [step for step, _ in told] == [2, 4]
    assert all(allocated >= 4 * 512 * 512 for _, allocated in told)


@pytest.mark.parametrize(("module", "said"), [("lightning", "pip install lightning"), ("hugging_face", "transformers")])
def test_a_library_that_is_not_there_is_one_sentence(module: str, said: str, run_program: Any) -> None:
    source = f"""
import sys
sys.modules.update(dict.fromkeys(("lightning", "pytorch_lightning", "transformers")))
from stalloc import SetupError
try:
    import stalloc.integrations.{module}
except SetupError as error:
    print(error)
"""
    done = run_program(source)
    assert said in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
