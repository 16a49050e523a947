"""What NCCL takes: its formulas against figures that others published, and its numbers of channels against their logs.

Every row names the thread or the log that it is from. A figure is met within 15 %, or lies within the span.
"""

from dataclasses import replace

import pytest

from stalloc.device import KNOWN_GPUS
from stalloc.sizes import MIB
from stalloc.sizing.nccl_memory import (
    Channels,
    Communicator,
    Links,
    NcclMemory,
    Span,
    channels_of,
    links_of,
    nccl_memory,
)


def links(card: str) -> Links:
    return links_of(card, KNOWN_GPUS[card].compute_capability)


def alone(num: int, **more: object) -> Communicator:
    """A communicator within one machine."""
    return Communicator(num_ranks=num, num_local=num, **more)  # type: ignore[arg-type]


def met(memory: Span, published_bytes: float) -> bool:
    return memory.least <= 1.15 * published_bytes and memory.most >= 0.85 * published_bytes


ALL_REDUCE = {"collectives": ("all_reduce",)}
BEFORE = (2, 18, 5)  # when connections were made with the communicator


def fixed(num: int) -> Span:
    return Span(least=num, most=num)


FIGURES = {
    "NVIDIA/nccl#964: 2 of 4 A100s with NVLink, 4 MB": (
        nccl_memory(links("A100-80GB"), alone(2, **ALL_REDUCE), version=BEFORE).device,
        544 * MIB,
    ),
    "NVIDIA/nccl#964: 3 ranks, rank 0": (
        nccl_memory(links("A100-80GB"), alone(3, **ALL_REDUCE), version=BEFORE).device,
        688 * MIB,
    ),
    "NVIDIA/nccl#964: 4 ranks, rank 0": (
        nccl_memory(links("A100-80GB"), alone(4, **ALL_REDUCE), version=BEFORE).device,
        688 * MIB,
    ),
    "NVIDIA/nccl#2363: 1 rank, B300, NCCL 2.28.9": (
        nccl_memory(links("B300"), alone(1, **ALL_REDUCE)).device,
        536_870_912,
    ),
    "NVIDIA/nccl#2366: 1 rank, connections at their first use": (
        nccl_memory(links("RTX-3090"), alone(1, **ALL_REDUCE), settings={"NCCL_CUMEM_ENABLE": "1"}).device,
        0,
    ),
    "NVIDIA/nccl#2366: 1 rank, NCCL_RUNTIME_CONNECT=0": (
        nccl_memory(links("RTX-3090"), alone(1, **ALL_REDUCE), settings={"NCCL_RUNTIME_CONNECT": "0"}).device,
        512 * MIB,
    ),
    "NVIDIA/nccl#1685: the first all-to-all of 8 H100s, 1.06 to 4.34 GB": (
        nccl_memory(links("H100"), alone(8, num_local_peers=(7, 7)), settings={"NCCL_CUMEM_ENABLE": "1"}).device,
        3.28e9,
    ),
    "vllm-project/vllm#9699: NVLink SHARP of 8 H200s, before 2.22": (
        nccl_memory(links("H200"), alone(8, **ALL_REDUCE), version=(2, 20, 5)).parts["switch"],
        2_415_919_104,
    ),
    "NVIDIA/nccl#660: 2 machines of 1 GPU, 16 channels": (
        nccl_memory(
            links("A100-80GB"),
            Communicator(num_ranks=2, num_local=1, num_nodes=2, num_remote_peers=(1, 1)),
            channels=Channels(collective=fixed(16), p2p=fixed(16), p2p_each_peer=fixed(2), nvls=0),
        ).parts["network"],
        33_554_432,
    ),
    "log of 8 H100s (p5.48xlarge), NCCL 2.28: nvlsTotalSize": (
        nccl_memory(links("H100"), alone(8, **ALL_REDUCE)).parts["switch"],
        268_435_456,
    ),
}


@pytest.mark.parametrize("row", FIGURES)
def test_published_figures_are_met(row: str) -> None:
    memory, published = FIGURES[row]
    assert met(memory, published), (memory, published)


def test_those_that_nothing_was_unknown_of_are_met_to_the_byte() -> None:
    exact = [row for row, (memory, _) in FIGURES.items() if memory.least == memory.most]
    assert len(exact) >= 7
    assert all(FIGURES[row][0].most == FIGURES[row][1] for row in exact if "1685" not in row)


def test_a_proxy_of_a_network_card_that_sees_the_host_only_is_as_published() -> None:
    """tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8: 9,641,984 bytes each, pinned."""
    used = Communicator(num_ranks=2, num_local=1, num_nodes=2, collectives=("broadcast",))
    one = Channels(collective=fixed(1), p2p=fixed(1), p2p_each_peer=fixed(1), nvls=0)
    assert nccl_memory(links("GB10"), used, channels=one).pinned.most == 2 * 9_641_984  # one each way


def test_shared_memory_of_gpus_that_do_not_reach_each_other_is_as_published() -> None:
    """Errors of /dev/shm/nccl-… name segments of 9,637,888 bytes, and of a page."""
    one = Channels(collective=fixed(1), p2p=fixed(1), p2p_each_peer=fixed(1), nvls=0)
    memory = nccl_memory(links("RTX-4090"), alone(2, **ALL_REDUCE), channels=one)
    assert memory.shared_memory == fixed(9_637_888 + 4096)
    assert memory.device.least == 0
    assert "ring" not in memory.parts


# card, GPUs of a machine, machines: collective, nvls, p2p, p2p channels per peer, as NCCL_DEBUG=INFO printed them
LOGS = {
    "8 H100s (p5.48xlarge)": ("H100", 8, 1, 24, 16, 32, 32),
    "8 H800s (NVIDIA/nccl#892, before NVLS)": ("H800", 8, 1, 16, None, 16, 16),
    "2 A100s": ("A100-80GB", 2, 1, 24, 0, 32, 32),
    "8 A100s": ("A100-80GB", 8, 1, 24, 0, 32, 32),
    "8 B200s": ("B200", 8, 1, 32, 24, 32, 32),
    "2 trays of GB200, one NVLink domain": ("GB200", 8, 1, 32, 24, 32, 32),
    "2 machines of 8 H800s (deepseek-ai/DeepEP#106)": ("H800", 8, 2, 16, 16, 16, 2),
    "machines of 8 H100s, 32 ranks": ("H100", 8, 4, 16, None, 16, 2),
    "2 cards on PCIe": ("L40S", 2, 1, 2, 0, 2, 2),
    "2 RTX 4090s": ("RTX-4090", 2, 1, 2, 0, 2, 2),
    "1 rank": ("B300", 1, 1, 64, 0, 64, 64),
}


@pytest.mark.parametrize("row", LOGS)
def test_the_number_of_channels_is_that_of_logs(row: str) -> None:
    card, local, nodes, collective, nvls, p2p, each = LOGS[row]
    found = channels_of(links(card), num_local=local, num_nodes=nodes)
    for span, logged in ((found.collective, collective), (found.p2p, p2p), (found.p2p_each_peer, each)):
        assert span.least <= logged <= span.most
        assert nodes > 1 or card in ("L40S", "RTX-4090") or span.least == span.most
    assert nvls is None or found.nvls == nvls


def eight(**settings: str) -> NcclMemory:
    """All-reduce on eight H100s in the middle of the chain, everything made at once."""
    used = alone(8, local_index=3, **ALL_REDUCE)
    return nccl_memory(links("H100"), used, settings={"NCCL_CUMEM_ENABLE": "0"} | settings)


def test_variables_of_nccl_count() -> None:
    usual = eight().parts
    assert usual == {
        "ring": fixed(24 * 12 * MIB),
        "tree": fixed(24 * 12 * MIB),
        "switch": fixed(16 * 2 * 8 * 128 * 1024 * 8),
        "network": fixed(32 * 16 * 512 * 1024),
    }
    assert eight(NCCL_BUFFSIZE="8388608").parts["ring"] == fixed(24 * 16 * MIB)
    assert eight(NCCL_MAX_NCHANNELS="4").parts["ring"] == fixed(4 * 12 * MIB)
    assert eight(NCCL_MIN_NCHANNELS="32").parts["ring"] == fixed(32 * 12 * MIB)
    assert "switch" not in eight(NCCL_NVLS_ENABLE="0").parts
    assert eight(NCCL_NVLS_NCHANNELS="8").parts["switch"] == fixed(usual["switch"].most // 2)
    assert eight(NCCL_PROTO="Simple").parts == usual  # buffers of all protocols are made
    assert eight(NCCL_BUFFSIZE="much").parts == usual  # NCCL takes it for none, too
    unreached = eight(NCCL_P2P_DISABLE="1")
    assert "ring" not in unreached.parts
    assert unreached.shared_memory.least > 0


def test_what_is_made_at_its_first_use_depends_on_the_calls() -> None:
    lazily = {"NCCL_CUMEM_ENABLE": "1"}
    h100 = links("H100")
    reduced = nccl_memory(h100, alone(8, **ALL_REDUCE), settings=lazily)
    gathered = nccl_memory(h100, alone(8, collectives=("all_gather",)), settings=lazily)
    assert set(reduced.parts) == {"ring", "tree", "switch"}
    assert set(gathered.parts) == {"ring", "switch"}
    assert reduced.parts["tree"].least == 0
    ring = nccl_memory(h100, alone(8, **ALL_REDUCE), settings=lazily | {"NCCL_ALGO": "Ring"})
    without = nccl_memory(h100, alone(8, **ALL_REDUCE), settings=lazily | {"NCCL_ALGO": "^NVLS"})
    assert set(ring.parts) == {"ring"}
    assert set(without.parts) == {"ring", "tree"}
    assert nccl_memory(h100, alone(8)).device == fixed(0)  # PyTorch has made none without a call


def test_more_machines_widen_the_span_and_none_is_empty() -> None:
    for card in KNOWN_GPUS:
        for local in (1, 2, 4, 8):
            for nodes in (1, 2, 5):
                used = Communicator(
                    num_ranks=local * nodes,
                    num_local=local,
                    num_nodes=nodes,
                    num_local_peers=(local - 1, local - 1),
                    **ALL_REDUCE,  # type: ignore[arg-type]
                )
                memory = nccl_memory(links(card), used)
                for span in (memory.device, memory.pinned, memory.shared_memory, *memory.parts.values()):
                    assert 0 <= span.least <= span.most
                assert memory.channels.collective.least >= 1
                assert nodes == 1 or memory.pinned.most > 0


def test_a_chain_has_two_ends() -> None:
    version, a100 = BEFORE, links("A100-80GB")
    sizes = [
        nccl_memory(a100, replace(alone(4, **ALL_REDUCE), local_index=at), version=version).parts["tree"].most
        for at in range(4)
    ]
    assert sizes == [144 * MIB, 288 * MIB, 288 * MIB, 144 * MIB]
