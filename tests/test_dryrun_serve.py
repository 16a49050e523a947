"""`stalloc dryrun --serve`: what a program that takes most of what is free makes of a card."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc

from stalloc.device.known_gpus import KNOWN_GPUS, PLENTY, takes_what_is_free
from stalloc.sizing.searches import last_enough

pytestmark = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

MIB = 1 << 20
BLOCK = 1 << 20
SERVER = """
import sys, torch
batch, say = int(sys.argv[1]), len(sys.argv) < 3
weights = [torch.empty(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
def measure():
    first = torch.empty(batch << 20, dtype=torch.uint8, device="cuda")
    return torch.empty(3 * batch << 20, dtype=torch.uint8, device="cuda")
measure()
peak = torch.cuda.max_memory_allocated()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
blocks = max(int(0.9 * free) - (peak - torch.cuda.memory_allocated()), 0) >> 20
if not blocks:
    raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
cache = torch.empty(blocks << 20, dtype=torch.uint8, device="cuda")
if say:
    print(f"GPU KV cache size: {16 * blocks:,} tokens")
x = torch.zeros(1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
graph.replay()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A server of 32 MiB of weights, blocks of 1 MiB for 16 tokens, and a first batch as large as it is told."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    return program


def dryrun(program: Path, *options: object, words: tuple[object, ...] = (8,)) -> tuple[Any, str, int]:
    """The JSON object, what was printed on one line, and the exit code."""
    out = program.with_name("result.json")
    out.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = run_stalloc("dryrun", "--json", out, *options, "--", program, *words, variables=variables)
    shown = " ".join((done.stdout + done.stderr).split())
    return json.loads(out.read_text()) if out.exists() else {}, shown, done.returncode


CARD = ("--serve", "--memory", "1GiB", "--headroom", "128MiB")


def test_a_server_is_divided_into_what_it_makes_of_the_card(server: Path) -> None:
    told, shown, code = dryrun(server, *CARD, "--length", 100)
    assert code == 0, shown
    assert told["weights_bytes"] == 32 * MIB
    assert told["activation_bytes"] == 4 * 8 * MIB
    assert told["activation_at"] == "server.py:7 measure"
    # 0.9 of what the context and the weights leave of the card, less the first batch
    blocks = (int(0.9 * (1024 - 128 - 32) * MIB) - 32 * MIB) // BLOCK
    assert told["cache_bytes"] == blocks * BLOCK
    assert told["cache_at"] == [["server.py:15 <module>", blocks * BLOCK]]
    assert told["tokens"] == 16 * blocks
    assert (told["num_graphs"], told["graph_bytes"]) == (1, 2 * MIB)
    assert f"{16 * blocks:,} tokens, 64.0 KiB each: {16 * blocks // 100} requests of 100 tokens" in shown
    assert told["tokens_least"] == int(16 * (blocks - 0.46 * 1024))
    assert f"{told['tokens_least']:,} to {told['tokens']:,} tokens" in shown


@pytest.mark.slow
def test_enough_tokens_decide_how_it_ends(server: Path) -> None:
    told, _, code = dryrun(server, *CARD, "--tokens", 11_900)
    assert (code, told["tokens"] >= 11_900) == (0, True)
    told, _, code = dryrun(server, *CARD, "--tokens", 12_000)
    assert (code, told["tokens"] < 12_000) == (1, True)


def test_the_largest_value_with_enough_tokens_is_that_of_running_every_one(server: Path) -> None:
    every, shown, _ = dryrun(server, *CARD, "--find", "batch=8..48:8", words=("{batch}",))
    tokens = {one["value"]: one["tokens"] for one in every["values"]}
    assert list(tokens) == [8, 16, 24, 32, 40, 48]
    assert all(f"{one:,}" in shown for one in tokens.values())
    wanted = tokens[24]
    found, shown, code = dryrun(
        server, *CARD, "--find", "batch=8..48:8", "--tokens", wanted, words=("{batch}",)
    )  # fmt: skip
    assert (found["largest"], code) == (max(value for value, has in tokens.items() if has >= wanted), 0)
    assert f"batch=24 is the largest with at least {wanted:,} tokens" in shown
    assert all(tokens[one["value"]] == one["tokens"] for one in found["values"])


@pytest.mark.slow
def test_the_smallest_card_with_enough_tokens_is_that_of_running_every_one(server: Path) -> None:
    found, shown, code = dryrun(server, "--serve", "--find", "gpu", "--tokens", 600_000)
    assert code == 0
    sizes = {name: card.total_bytes - (512 << 20) - 32 * MIB for name, card in KNOWN_GPUS.items()}
    enough = [name for name, free in sizes.items() if 16 * ((int(0.9 * free) - 32 * MIB) // BLOCK) >= 600_000]
    least = min(KNOWN_GPUS[name].total_bytes for name in enough)
    assert KNOWN_GPUS[found["gpu"]].total_bytes == least
    assert f"{found['gpu']} is the smallest card with at least 600,000 tokens" in shown


def test_where_enough_ends_is_found_for_every_row() -> None:
    chosen = random.Random(5)
    for _ in range(300):
        row = sorted((chosen.randrange(9) for _ in range(chosen.randrange(12))), reverse=True)
        wanted = chosen.randrange(10)
        tried: list[int] = []

        def enough(places: Any, row: list[int] = row, wanted: int = wanted, tried: list[int] = tried) -> list[bool]:
            tried += places
            return [row[place] >= wanted for place in places]

        answer = last_enough(len(row), enough)
        assert answer == sum(one >= wanted for one in row) - 1
        assert {place for place in (answer, answer + 1) if 0 <= place < len(row)} <= set(tried)


@pytest.mark.slow
def test_a_program_that_takes_what_is_free_is_told_to_be_served(server: Path) -> None:
    told, shown, _ = dryrun(server, "--memory", "1GiB")
    assert told["uncertain"]["taking_what_is_free"] > PLENTY // 2
    assert "this program sizes itself by what is free: given 2048.00 GiB it took" in shown
    assert "next: stalloc dryrun --serve" in shown


@pytest.mark.parametrize(
    ("total", "reserved", "takes"),
    [(PLENTY, PLENTY // 2, False), (PLENTY, PLENTY // 2 + 1, True), (80 << 30, 79 << 30, False)],
)
def test_only_most_of_plenty_is_what_is_free(total: int, reserved: int, takes: bool) -> None:
    assert takes_what_is_free(total, reserved) is takes


@pytest.mark.slow
def test_a_program_of_one_size_has_no_cache(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text('import torch\nheld = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")\n')
    told, shown, code = dryrun(program, *CARD)
    assert (code, told["cache_bytes"], told["tokens"]) == (0, None, None)
    assert "no cache was found: the program takes the same on a larger card" in shown


@pytest.mark.slow
def test_an_engine_that_does_not_say_its_tokens(server: Path) -> None:
    told, shown, code = dryrun(server, *CARD, words=(8, "quiet"))
    assert (code, told["tokens"], told["weights_bytes"]) == (0, None, 32 * MIB)
    assert "a line `GPU KV cache size: N tokens` that the program prints says it" in shown
    _, shown, code = dryrun(server, *CARD, "--find", "batch=8..16", "--tokens", 9, words=("{batch}", "quiet"))
    assert code == 2
    assert "is not known of this engine" in shown


@pytest.mark.slow
def test_an_engine_in_another_process_is_told_by_its_log(tmp_path: Path) -> None:
    program = tmp_path / "apart.py"
    program.write_text("""
print("Load weight end. elapsed=0.01 s, avail mem=0.76 GB, mem usage=0.10 GB.")
print("[22:03:06] KV Cache is allocated. #tokens: 4096, K size: 0.25 GB, V size: 0.25 GB")
print("Capture cuda graph end. Time elapsed: 1.23 s. mem usage=0.03 GB. avail mem=0.23 GB.")
""")
    told, shown, code = dryrun(program, *CARD, words=())
    assert (code, told["by"], told["tokens"], told["num_graphs"]) == (0, "log", 4096, 0), shown
    assert (told["cache_bytes"], told["graph_bytes"]) == (512 * MIB, round(0.03 * 1024 * MIB))
    assert "CUDA graphs 30.72 MiB" in shown


LMDEPLOY = """
import torch
class CacheEngine:
    def __init__(self, cache_config):
        self.cache_config = cache_config
        self.cache = torch.empty(cache_config.num_gpu_blocks << 20, dtype=torch.uint8, device="cuda")
"""
USES_LMDEPLOY = """
import os, types, torch
from lmdeploy.pytorch.engine.cache_engine import CacheEngine
assert os.environ["LMDEPLOY_ENABLE_CHECK_ENV"] == "0"
weights = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
blocks = torch.cuda.mem_get_info()[0] // 2 >> 20
engine = CacheEngine(types.SimpleNamespace(num_gpu_blocks=blocks, num_reserved_gpu_blocks=1, block_size=64))
"""


@pytest.mark.slow
def test_tokens_of_lmdeploy_are_those_of_its_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "lmdeploy" / "pytorch" / "engine"
    folder.mkdir(parents=True)
    (folder / "cache_engine.py").write_text(LMDEPLOY)
    program = tmp_path / "uses_lmdeploy.py"
    program.write_text(USES_LMDEPLOY)
    told, shown, code = dryrun(program, *CARD, words=())
    assert code == 0, shown
    assert told["tokens"] == 64 * (told["cache_bytes"] // BLOCK - 1)


@pytest.mark.slow
def test_a_card_that_is_too_small(server: Path) -> None:
    told, shown, code = dryrun(server, "--serve", "--memory", "150MiB", "--headroom", "128MiB")
    assert (code, told["starts"]) == (1, False)
    assert "it does not start, for lack of memory: server.py:4" in shown
    told, shown, code = dryrun(server, *CARD, words=(200,))
    assert (code, told["starts"], told["tokens"]) == (1, False, None)
    assert "it does not start, for lack of memory" in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tokens", 5), "--length and --tokens describe a server's cache: give --serve too."),
        (("--serve", "--length", 0), "--length is 0: give a number from 1."),
        (("--serve", "--ranks", 2), "--serve runs on one GPU: leave --ranks out."),
        (("--serve", "--node"), "--serve shows what the device holds: leave --node out"),
        (("--serve", "--find", "gpu"), "needs to know how much is enough: give --tokens N."),
        (("--serve", "--find", "gpu", "--tokens", 1, "--memory", "9GiB"), "looks through all cards"),
        (("--serve", "--find", "batch=1..99"), "--find names 99 values, which would all be run"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(server: Path, options: tuple[object, ...], sentence: str) -> None:
    _, shown, code = dryrun(server, *options, words=("{batch}",))
    assert code == 2
    assert sentence in shown
