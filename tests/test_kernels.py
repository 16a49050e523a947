"""Batched copy, fill and check: what memory holds afterwards, in Triton's interpreter and by the references."""

import importlib.util
import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from stalloc import kernels
from stalloc.errors import BadInputError
from stalloc.kernels.configs import Config, config_for
from stalloc.kernels.worklist import HEADER_WORDS, MAX_CHUNK_BYTES, ROW_WORDS, ROWS_AT, work_table

MIB = 1 << 20


@pytest.fixture(scope="module")
def triton_installed() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")


# random blocks, placed so that nothing that is written is shared; what no block covers has to stay as it was
_CASES = """
import json, sys
import numpy as np
from stalloc import kernels

ROOM = 16 << 20
seed, cases, largest = (int(word) for word in sys.argv[1:])
rng = np.random.default_rng(seed)
buffers = [np.zeros(ROOM + 512, np.uint8) for _ in range(2)]
memory, expected = (buffer[-buffer.ctypes.data % 512 :][:ROOM] for buffer in buffers)
memory[:] = expected[:] = rng.integers(0, 256, ROOM)
failures, counts = [], {}
for case in range(cases):
    num = int(rng.choice([0, 1, 1, 2, 3, 4, 12]))
    grain = int(rng.choice([1, 2, 4, 8, 16, 512]))
    size = np.minimum(2 ** (rng.random(num) * np.log2(largest)), largest).astype(np.int64)
    size[rng.random(num) < 0.1] = 0
    size = size // 512 * 512 if grain == 512 else size
    room = np.repeat(size, 2) + rng.integers(0, 70, 2 * num)
    room += -room % grain
    while room.sum() > ROOM:
        size, room = size[1:], room[2:]
    order = rng.permutation(len(room))
    low = np.zeros(len(room), np.int64)
    low[order] = np.cumsum(room[order]) - room[order]
    source, target = low[0::2], low[1::2]
    pattern = rng.integers(0, 256, int(rng.choice([1, 2, 4, 8, 16]))).astype(np.uint8).tobytes()
    spots = (target + rng.integers(0, np.maximum(size, 1)))[size > 0][::2]
    name = ["copy", "fill", "copy_fill", "mismatches"][case % 4]
    results = []
    for place, kind in ((memory, "batched"), (expected, "host")):
        function = getattr(kernels, kind + "_" + name)
        a, b = source + place.ctypes.data, target + place.ctypes.data
        if name == "copy":
            function(a, b, size)
        elif name == "fill":
            function(b, size, pattern)
        elif name == "copy_fill":
            function(a, b, size, pattern)
        else:
            kernels.host_fill(b, size, pattern)
            place[spots] ^= 255
            results.append(function(b, size, pattern).tolist())
    if (memory != expected).any() or (results and results[0] != results[1]):
        failures.append([case, name, num])
        expected[:] = memory
    counts[name] = counts.get(name, 0) + 1
print(json.dumps({"failures": failures, "counts": counts, "torch": "torch" in sys.modules}))
"""


@pytest.mark.usefixtures("triton_installed")
@pytest.mark.parametrize(
    ("seed", "cases", "largest"),
    [
        (1, 28, 4096),
        *(pytest.param(*numbers, marks=pytest.mark.slow) for numbers in ((3, 20, MIB), (1, 230, 4096), (2, 230, 4096))),
    ],
)
def test_kernels_leave_memory_as_the_reference_does(run_checks: Any, seed: int, cases: int, largest: int) -> None:
    print(f"seed {seed}")
    arguments = [str(number) for number in (seed, cases, largest)]
    found = run_checks(_CASES, *arguments, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert found["failures"] == []
    assert sum(found["counts"].values()) == cases
    assert not found["torch"]


@pytest.mark.usefixtures("triton_installed")
@pytest.mark.parametrize("capability", [90, *(pytest.param(one, marks=pytest.mark.slow) for one in (80, 100))])
def test_kernels_compile_without_a_gpu_and_move_128_bits_at_a_time(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stalloc.kernels import triton_code
    from stalloc.kernels.launch import MODES

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: the compiler is out of reach")
    try:
        triton.knobs.nvidia.ptxas.path  # noqa: B018  (raises where there is none)
    except (RuntimeError, AttributeError):
        pytest.skip("Triton came without ptxas")
    config = config_for(divmod(capability, 10))
    shape = {
        "TILE_BYTES": config.tile_bytes,
        "BYTE_TILE": config.byte_tile,
        "GROUP_ROWS": config.group_rows,
    }
    vector = {}
    for mode, number in MODES.items():
        constants = {"MODE": number, **shape}
        signature = {"table": "i64", **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=triton_code.batched, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": config.num_warps})
        found = re.findall(r"\b(ld|st)\.global\.v4\.b32", made.asm["ptx"])
        vector[mode] = {kind: found.count(kind) for kind in ("ld", "st")}
        assert len(made.asm["cubin"]) > 0
    per_tile = config.tile_bytes // (config.num_warps * 32 * 16)
    assert vector["copy"]["ld"] >= per_tile
    assert vector["copy"]["st"] >= per_tile
    assert vector["fill"]["st"] >= per_tile
    assert vector["copy-fill"]["st"] >= 2 * per_tile
    assert vector["check"]["ld"] >= per_tile


def _rows(table: np.ndarray) -> tuple[list[int], np.ndarray]:
    return table[:HEADER_WORDS].tolist(), table[ROWS_AT:].reshape(-1, ROW_WORDS)


@pytest.mark.parametrize("seed", range(5))
def test_a_work_table_covers_every_byte_once_and_never_claims_a_grid_that_is_not_there(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    size = (2 ** (rng.random(200) * 24)).astype(np.int64)
    target = np.cumsum(size + 600) - size + rng.integers(0, 40, 200)
    source = target + (1 << 40) + rng.integers(-8, 8, 200) * rng.choice([1, 4, 16], 200)
    table, units = work_table(source, target, size, bytes(range(16)), config=Config(), num_programs=16)
    header, rows = _rows(table)
    assert sum(header) == len(rows)
    assert units >= header[0] + header[1] + header[2]
    section = np.repeat(np.arange(5), header[:5])
    grid = np.array([16, 4, 1, 16, 1])[section]
    assert not ((rows[:, 0] | rows[:, 1] | rows[:, 2]) % grid).any()
    assert (rows[section == 3, 2] <= 512).all()
    assert (rows[section == 4, 2] <= 64).all()
    order = np.argsort(rows[:, 1])
    rows = rows[order]
    block = np.searchsorted(target, rows[:, 1], side="right") - 1
    assert (rows[:, 0] - rows[:, 1] == (source - target)[block]).all()
    assert ((rows[:, 1] - target[block]) % 16 == rows[:, 3]).all()
    assert np.add.reduceat(rows[:, 2], np.flatnonzero(np.diff(block, prepend=-1))).tolist() == size.tolist()
    assert (rows[1:, 1] >= (rows[:, 1] + rows[:, 2])[:-1]).all()


def test_one_huge_block_keeps_all_programs_busy_and_tiny_ones_share_one() -> None:
    huge = np.array([64 << 30], np.int64)
    _, units = work_table(None, huge * 0, huge, bytes(16), config=Config(), num_programs=528)
    assert units >= 64 * 1024 // (MAX_CHUNK_BYTES >> 20)
    modest = np.array([32 << 20], np.int64)
    _, units = work_table(None, modest * 0, modest, bytes(16), config=Config(), num_programs=528)
    assert units >= 528
    tiny = np.full(1000, 512, np.int64)
    _, units = work_table(None, np.arange(1000) * 512, tiny, bytes(16), config=Config(group_rows=8), num_programs=528)
    assert units == 125


@pytest.mark.parametrize(("count", "largest", "grain"), [(1000, 64, MIB), (10_000, 128, 512), (3000, 3000, 4096)])
def test_every_program_has_nearly_as_many_bytes_to_do(count: int, largest: int, grain: int) -> None:
    rng = np.random.default_rng(8)
    size = rng.integers(1, largest + 1, count) * grain
    start = np.cumsum(size) - size
    programs = 528
    table, _ = work_table(start, start + (1 << 44), size, bytes(16), config=Config(), num_programs=programs)
    header, rows = _rows(table)
    count_long = sum(header[:3])
    turn, place = np.divmod(np.arange(count_long), programs)
    done = np.bincount(np.where(turn % 2, programs - 1 - place, place), rows[:count_long, 2], programs)
    assert done.max() <= 1.05 * done.mean()


def test_tables_that_programs_could_not_do_in_any_order_are_refused() -> None:
    refused = [
        (kernels.batched_copy, ([0, 4096], [8192, 8200], [100, 100])),  # two targets
        (kernels.batched_copy, ([0, 4096], [4100, 9000], [100, 100])),  # a target and a source
        (kernels.batched_copy, ([0], [50], [100])),  # a block and itself
        (kernels.batched_fill, ([0, 10, 5], [1, 1, 50])),
        (kernels.batched_copy_fill, ([0, 50], [4096, 8192], [100, 100])),  # two sources
        (kernels.batched_copy, ([0, 1], [2], [1])),
        (kernels.batched_copy, ([0], [64], [-1])),
        (kernels.batched_fill, ([0.5], [1])),
        (kernels.batched_fill, ([64], [1], 256)),
        (kernels.batched_fill, ([64], [1], b"abc")),
    ]
    for function, arguments in refused:
        with pytest.raises(BadInputError):
            function(*arguments)


def test_any_overlap_is_found_and_nothing_else() -> None:
    from stalloc.kernels.block_columns import check_disjoint

    def clash(source: np.ndarray, target: np.ndarray, size: np.ndarray) -> bool:
        written = [set(range(t, t + n)) for t, n in zip(target, size, strict=True)]
        read = [set(range(s, s + n)) for s, n in zip(source, size, strict=True)]
        pairs = itertools.combinations(written, 2)
        return any(a & b for a, b in pairs) or any(a & b for a in written for b in read)

    rng = np.random.default_rng(7)
    seen = {True: 0, False: 0}
    for _ in range(400):
        num = int(rng.integers(1, 5))
        source, target = rng.integers(0, 40, (2, num))
        size = rng.integers(1, 8, num)
        expected = clash(source, target, size)
        seen[expected] += 1
        try:
            check_disjoint(source, target, size)
            assert not expected, (source, target, size)
        except BadInputError:
            assert expected, (source, target, size)
    assert min(seen.values()) > 50


def test_empty_tables_need_neither_triton_nor_a_gpu(run_checks: Any) -> None:
    program = """
import json, sys
from stalloc import kernels
for name in ("copy", "copy_fill"):
    getattr(kernels, "batched_" + name)([], [], [])
    getattr(kernels, "batched_" + name)([1], [2], [0])
kernels.batched_fill([], [])
print(json.dumps([kernels.batched_mismatches([], []).tolist(), kernels.batched_mismatches([5], [0]).tolist(),
                  "torch" in sys.modules, "triton" in sys.modules]))
"""
    assert run_checks(program) == [[], [0], False, False]


@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_the_torch_reference_agrees_with_the_one_on_host_memory(run_checks: Any) -> None:
    program = """
import json
from stalloc import device, kernels
device.activate("virtual")
import torch
import numpy as np
from stalloc.device.virtual import after_torch_import
rng = np.random.default_rng(3)
memories = [rng.integers(0, 256, 100_000).astype(np.uint8)]
memories.append(memories[0].copy())
source, target, size = np.array([1, 5000, 77]), np.array([50_001, 60_000, 90_001]), np.array([4000, 1, 0])
counts = []
for memory, kind, options in ((memories[0], "host", {}), (memories[1], "torch", {"device": "cpu"})):
    at = memory.ctypes.data
    getattr(kernels, kind + "_copy")(source + at, target + at, size, **options)
    getattr(kernels, kind + "_fill")(target[:1] + at + 7, size[:1] - 9, b"abcd", **options)
    getattr(kernels, kind + "_copy_fill")(source + at, target + at + 5000, size, 3, **options)
    counts.append(getattr(kernels, kind + "_mismatches")(target + at, size, b"abcd", **options).tolist())
print(json.dumps([bool((memories[0] == memories[1]).all()), counts]))
"""
    same, counts = run_checks(program)
    assert same
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("cuda_torch", "cupy_installed", "triton_installed")
def test_launches_reach_the_virtual_gpu(run_checks: Any) -> None:
    program = """
import json
from stalloc import install, kernels
install(device="virtual")
import torch
block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
half = block.data_ptr() + (1 << 19)
kernels.batched_copy([block.data_ptr()], [half], [1 << 19])
kernels.batched_fill([half], [1000], 7)
kernels.batched_copy_fill([block.data_ptr()], [half], [999])
print(json.dumps(len(kernels.batched_mismatches([half, half], [10, 20]))))
"""
    assert run_checks(program) == 2


def test_an_unknown_architecture_gets_the_one_before_it() -> None:
    assert config_for((9, 0)) == config_for((9, 9))
    assert config_for((12, 0)) == config_for((10, 0))
    assert config_for((7, 0)) == Config()


def test_autotune_says_that_it_needs_a_gpu(run_program: Any) -> None:
    done = run_program(
        "import sys; sys.modules['torch'] = None; from stalloc.kernels.autotune import main; sys.exit(main())"
    )
    assert done.returncode == 2
    assert done.stdout.startswith("stalloc.kernels.autotune: no GPU")
    assert json.dumps(done.stdout).count("\\n") == 1
