"""Published systems that let a program need less memory, and what of each stalloc does today.

Contract: a status says what is done, not what is meant to be. "executes": runs for real; "in part": so does the part of
it that is named, and what the system is about is not there as a whole; "emulates": runs, with a stand-in for hardware;
"replays": on a trace; "reports": a figure from a formula. Each has a command that runs, and a test that fails where
that is not so.
"""

from dataclasses import dataclass
from typing import Literal

Status = Literal["executes", "in part", "emulates", "replays", "reports"]


@dataclass(frozen=True)
class System:
    """One system, by the name that `stalloc fit --policy` takes where it executes within a fit."""

    name: str
    source: str  #: who published it
    does: str  #: and, in part, what is missing
    status: Status
    where: str  #: what to type
    test: str  #: FILE::TEST in the source tree


_SHARD = "stalloc shard --ranks N --way"
_FIT, _SWAP = "stalloc fit --policy", "stalloc swap --budget SIZE"  # of a program, of a recording with --ops
_EVICT = "stalloc evict --budget 0.5 --policy"  # of a recording with --ops
# fmt: off
SYSTEMS: tuple[System, ...] = (
    System(
        "recompute", "stalloc", "operations and blocks, most bytes for a second first", "executes", "stalloc fit",
        "test_fit.py::test_what_fits_is_found_and_the_program_as_it_is_comes_first",
    ),
    System(
        "blocks:N", "Chen et al. 2016", "the first N blocks as a whole", "executes", f"{_FIT} blocks:N",
        "test_recompute_policies.py::test_policies_by_name_recompute_what_they_say",
    ),
    System(
        "keep-attention", "LoongTrain, DistFlashAttn",
        "all but the results of attention (also called remat-aware); not their parallelism over sequences",
        "executes", f"{_FIT} keep-attention",
        "test_recompute_policies.py::test_policies_by_name_recompute_what_they_say",
    ),
    System(
        "selective", "Korthikanti et al.",
        "the core of attention that is written out; not parallelism over sequences", "executes", f"{_FIT} selective",
        "test_fit_programs.py::test_what_a_layer_saves_is_what_korthikanti_says",
    ),
    System(
        "checkmate", "Checkmate", "the cheapest choice of blocks, proven", "executes",
        f"{_FIT} checkmate --budget SIZE",
        "test_checkmate.py::test_random_graphs_cost_what_trying_everything_finds",
    ),
    System(
        "step-in-backward", "LOMO, PyTorch", "updates as gradients come", "executes", f"{_FIT} step-in-backward",
        "test_step_in_backward.py::test_parameters_and_state_are_the_same_and_no_gradient_is_left",
    ),
    System(
        "compile-budget", "PyTorch", "a share for compiled code", "executes", f"{_FIT} compile-budget",
        "test_fit_programs.py::test_compiled_code_saves_less_for_a_budget",
    ),
    System(
        "stalloc", "STAlloc (Huang et al.)", "a plan of where everything lives", "executes", "stalloc run",
        "test_simulate.py::test_what_is_promised_for_stalloc_is_what_a_run_reserves",
    ),
    System(
        "expandable", "PyTorch", "expandable segments", "replays", "stalloc simulate",
        "test_replay_torch.py::test_expandable_segments_grow_and_shrink_by_pages",
    ),
    System(
        "gmlake", "GMLake", "stitches blocks of mapped memory", "replays", "stalloc simulate --allocator gmlake",
        "test_replay_models_rules.py::test_gmlake_stitches_free_blocks_and_knows_the_stitched_block_afterwards",
    ),
    System(
        "zero-r", "ZeRO-R (DeepSpeed)", "contiguous buffers; no buckets of one size, activations not over ranks",
        "in part", "stalloc.contiguous_buffers",
        "test_compaction_torch.py::test_contiguous_buffers_are_gapless_and_refuse_what_cannot_be",
    ),
    System(
        "annealing", "Imanishi and Xu", "a plan by simulated annealing", "executes",
        "stalloc plan --method annealing",
        "test_planner_annealing.py::test_recorded_traces_are_planned_at_their_maximum_load_but_for_a_few",
    ),
    System(
        "roam", "ROAM", "another order of operations, laid out", "replays",
        "stalloc stats --order (after record --ops)",
        "test_operations.py::test_branches_need_less_one_by_one_and_a_program_in_that_order_does",
    ),
    System(
        "dtr", "DTR", "evicts what costs least for its size and age, as memory is short; blocks, where it runs",
        "executes", f"stalloc run --cap SIZE --cap-policy dtr, {_EVICT} dtr,dtr-eq,dtr-local",
        "test_eviction_rules.py::test_a_log_by_hand_is_replayed_as_plainly_written",
    ),
    System(
        "dte", "MegTaiChi", "DTE: as dtr, free neighbours counted", "replays", f"{_EVICT} dte",
        "test_eviction.py::test_dte_joins_free_neighbours_where_dtr_does_not",
    ),
    System(
        "dtp", "MegTaiChi", "DTP: weights over ranks; tensors are not split by how they are used", "in part",
        f"{_SHARD} zero-3", "test_shard.py::test_what_is_foreseen_is_what_a_rank_holds",
    ),
    System(
        "tma", "MegTaiChi", "TMA: places for what repeats, by stalloc's planner instead of theirs", "in part",
        "stalloc plan", "test_simulate.py::test_what_is_promised_for_stalloc_is_what_a_run_reserves",
    ),
    System(
        "coop", "Coop", "evicts neighbours in memory that make room", "replays", f"{_EVICT} coop",
        "test_eviction.py::test_the_window_is_the_cheapest_of_all",
    ),
    System(
        "offload-ratio", "Yuan et al.", "a share of saved activations in host memory; not aware of pipelines",
        "executes", f"{_FIT} offload-ratio --host SIZE",
        "test_offloading.py::test_memory_falls_by_the_ratio_and_every_step_lets_go_at_the_same_places",
    ),
    System(
        "tsplit", "TSPLIT", "one case: the head and its loss, rows in parts; nothing is split by a plan", "in part",
        "stalloc.chunked_cross_entropy",
        "test_offloading.py::test_a_head_in_parts_has_the_loss_of_the_whole_within_rounding_and_never_all_logits",
    ),
    System(
        "tmo", "TMO (Lin et al. 2023)", "ranks on one link swap other tensors, in turn", "emulates",
        f"{_SWAP} --ranks N, stalloc.SharedLink",
        "test_link_sharing.py::test_two_processes_copy_one_at_a_time_each_way_and_take_turns",
    ),
    System(
        "page", "stalloc", "optimizer state in host memory, part by part", "executes", f"{_FIT} page --host SIZE",
        "test_paging.py::test_parameters_and_state_are_the_optimizers_own_to_the_last_bit",
    ),
    System(
        "zero-offload", "ZeRO-Offload", "gradients leave in backward, Adam updates on the processor", "executes",
        f"{_FIT} zero-offload --host SIZE",
        "test_gradients_in_host.py::test_everything_that_a_program_sees_is_its_own_to_the_last_bit_or_refused",
    ),
    System(
        "twin-flow", "DeepSpeed", "the same of a share of parameters", "executes",
        f"{_FIT} twin-flow:SHARE --host SIZE",
        "test_paging.py::test_the_processors_updates_differ_by_rounding_and_fused_ones_not_at_all",
    ),
    System(
        "l2l", "L2L", "one layer, and its gradients, at a time; microbatches go through it in turn", "executes",
        f"{_FIT} l2l --host SIZE, stalloc.stream_layers(model, window=1, microbatches=N)",
        "test_gradients_in_host.py::test_what_is_held_does_not_grow_with_depth_and_copies_are_in_order",
    ),
    System(
        "stronghold", "STRONGHOLD", "a window of layers, updated on the processor beside backward", "executes",
        f"{_FIT} stronghold --host SIZE",
        "test_gradients_in_host.py::test_it_is_so_in_every_stack",
    ),
    System(
        "harmony", "Harmony", "packs of layers, swapped", "replays", _SWAP,
        "test_swapping.py::test_packs_are_the_best_of_all_ways_to_pack",
    ),
    System(
        "mobius", "Mobius", "stages swapped over one root", "replays", _SWAP,
        "test_swapping.py::test_stages_are_the_best_of_all_partitions",
    ),
    System(
        "patrickstar", "PatrickStar", "parameters in chunks", "replays", _SWAP,
        "test_swapping.py::test_belady_moves_as_little_as_any_order_of_evictions",
    ),
    System(
        "elixir", "Elixir", "the size of chunks, searched", "replays", _SWAP,
        "test_swapping.py::test_the_search_of_chunk_sizes_picks_the_best_of_the_whole_grid",
    ),
    System(
        "zero-infinity", "ZeRO-Infinity", "state and layers on disk, of one rank", "executes",
        f"{_FIT} zero-infinity --host SIZE --disk FOLDER:SIZE",
        "test_paging.py::test_state_on_disk_is_the_optimizers_own_to_the_last_bit",
    ),
    System(
        "angel", "Angel-PTM", "parameters in pages of 4 MiB", "replays", _SWAP,
        "test_swapping.py::test_pages_move_as_little_as_any_order_of_evictions",
    ),
    System(
        "smart-infinity", "Smart-Infinity", "updates in drives that compute", "reports", _SWAP,
        "test_swapping.py::test_drives_that_compute_pay_from_where_the_link_holds_the_host_up",
    ),
    System(
        "lohan", "LoHan", "how many activations to swap to the host, no disk", "replays", _SWAP,
        "test_swapping.py::test_the_amount_that_is_swapped_is_the_best_of_all_amounts_and_of_all_choices_of_layers",
    ),
    System(
        "moe-cache", "MoESys", "a cache of experts for inference, by use; no training, no ring of sections",
        "in part", "stalloc.cache_experts",
        "test_streaming.py::test_experts_compute_what_they_would_without_a_cache_and_take_no_more_than_its_room",
    ),
    System(
        "zero-1…3", "ZeRO", "state, gradients, weights over ranks", "executes", f"{_SHARD} zero-1, zero-2, zero-3",
        "test_shard.py::test_what_is_foreseen_is_what_a_rank_holds",
    ),
    System(
        "fsdp", "PyTorch FSDP", "units of weights over ranks", "executes", f"{_SHARD} zero-3",
        "test_shard_ranks.py::test_four_processes_train_as_one",
    ),
    System(
        "zero++", "ZeRO++",
        "a second copy within a node; the quantised gather is stalloc.techniques.quantised_gather, by itself",
        "in part", f"{_SHARD} hpz:K",
        "test_shard_ranks.py::test_a_rotated_layer_is_the_linear_one_and_a_quantised_gather_is_near",
    ),
    System(
        "mics", "MiCS", "groups of ranks", "executes", f"{_SHARD} mics:K",
        "test_shard.py::test_what_is_foreseen_is_what_a_rank_holds",
    ),
    System(
        "paro", "PaRO", "all 14 triples are costed; those that PyTorch has something for run", "in part",
        "stalloc shard --ranks N --per-node K",
        "test_shard.py::test_the_cheapest_triple_within_a_budget_is_that_of_all_triples",
    ),
    System(
        "amsp", "AMSP", "the cheapest triple under a cap, among those that run", "in part",
        "stalloc shard --ranks N --factors all --budget SIZE",
        "test_shard.py::test_the_cheapest_triple_within_a_budget_is_that_of_all_triples",
    ),
    System(
        "rtp", "RTP", "weights that rotate, of linear layers; not of a model as it is", "in part",
        "stalloc.techniques.rotated_linear.RotatedLinear",
        "test_shard_ranks.py::test_a_rotated_layer_is_the_linear_one_and_a_quantised_gather_is_near",
    ),
)
# fmt: on
