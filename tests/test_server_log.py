"""`stalloc explain` of logs of vLLM and SGLang: lines as their releases word them, with figures of public threads."""

import json

import pytest

from stalloc.cli import main

GIB = 1 << 30
V0 = """\
INFO 05-30 16:23:28 worker.py:267] the current vLLM instance can use total_gpu_memory ({total}GiB) x \
gpu_memory_utilization ({share}) = {budget}GiB
INFO 05-30 16:23:28 worker.py:267] model weights take {weights}GiB; non_torch_memory takes {outside}GiB; PyTorch \
activation peak memory takes {peak}GiB; the rest of the memory reserved for KV Cache is {cache}GiB.
INFO 05-30 16:23:28 executor_base.py:110] # CUDA blocks: {blocks}, # CPU blocks: 9362
INFO 05-30 16:23:28 executor_base.py:115] Maximum concurrency for {length} tokens per request: {fits}x
"""
T4 = V0.format(
    total=14.56, share="0.50", budget=7.28, weights=2.89, outside=0.01, peak=2.02, cache=2.36, blocks=5519,
    length=32768, fits=2.69,
)  # fmt: skip
ENABLED = """\
(EngineCore pid=7) INFO 07-01 04:24:29 [core.py:114] Initializing a V1 LLM engine (v0.21.0) with config: model='m', \
tensor_parallel_size=1
(EngineCore pid=7) INFO 07-01 04:24:30 [gpu_model_runner.py:4959] Model loading took 20.50 GiB memory and 9.1 seconds
(EngineCore pid=7) INFO 07-01 04:24:37 [gpu_model_runner.py:6517] Estimated CUDA graph memory: 4.20 GiB total
(EngineCore pid=7) INFO 07-01 04:24:37 [gpu_worker.py:480] Available KV cache memory: 13.50 GiB
(EngineCore pid=7) INFO 07-01 04:24:37 [gpu_worker.py:495] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.9200 is equivalent to --gpu-memory-utilization=0.7900 without it.
(EngineCore pid=7) INFO 07-01 04:24:37 [kv_cache_utils.py:1708] GPU KV cache size: 1,135,957 tokens
(EngineCore pid=7) INFO 07-01 04:24:37 [kv_cache_utils.py:1709] Maximum concurrency for 131,072 tokens per \
request: 8.67x
(EngineCore pid=7) INFO 07-01 04:24:47 [gpu_worker.py:621] CUDA graph pool memory: 0.56 GiB (actual), 4.2 GiB \
(estimated), difference: 3.64 GiB (650.0%).
"""
SGLANG = """\
[2025-03-08 12:29:02] server_args=ServerArgs(model_path='m', mem_fraction_static=0.85, tp_size=4, max_total_tokens=None)
[2025-03-08 12:29:10 TP0] Load weight begin. avail mem=21.63 GB
[2025-03-08 12:29:21 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem={after} GB, \
mem usage=15.54 GB.
[2025-03-08 12:29:21 TP0] KV Cache is allocated. #tokens: 46611, K size: {half} GB, V size: {half} GB
[2025-03-08 12:29:21 TP1] KV Cache is allocated. #tokens: 46611, K size: {half} GB, V size: {half} GB
[2025-03-08 12:29:21 TP0] Memory pool end. avail mem=2.09 GB
[2025-03-08 12:29:28 TP0] Capture cuda graph end. Time elapsed: 7.23 s. avail mem=0.53 GB. mem usage=0.93 GB.
[2025-03-08 12:29:29 TP0] max_total_num_tokens=46611, chunked_prefill_size=2048, context_len=131072
"""


@pytest.fixture
def explain(tmp_path, capsys):
    """What JSON and text say of a log, the text on one line."""

    def explained(text):
        log, out = tmp_path / "server.log", tmp_path / "out.json"
        log.write_text(text)
        assert main(["explain", str(log), "--json", str(out)]) == 0
        (told,) = json.loads(out.read_text())["servers"]
        return told, " ".join(capsys.readouterr().out.split())

    return explained


def test_a_start_as_its_settings_predict_says_so(explain):
    told, shown = explain(T4)
    assert (told["engine"], told["share"], told["tokens"], told["length"]) == ("vLLM", 0.5, 5519 * 16, 32768)
    assert told["activation_bytes"] == round(2.02 * GIB)
    assert told["findings"] == []
    assert "No line of it differs from what its settings and its other lines predict." in shown
    assert "88,304 tokens, 28.0 KiB each; 2.69 requests of 32,768 tokens" in shown


@pytest.mark.parametrize(
    ("outside", "cache", "causes"),
    [("0.46", "1.91", []), ("0.48", "1.89", ["another process"]), ("1.20", "1.17", ["another process"])],
)
def test_memory_outside_of_pytorch_on_one_card_is_anothers_above_what_public_logs_have(explain, outside, cache, causes):
    told, shown = explain(T4.replace("takes 0.01GiB", f"takes {outside}GiB").replace("2.36GiB", f"{cache}GiB"))
    assert [one["cause"] for one in told["findings"]] == causes
    assert ("another process took" in shown) == bool(causes)


def test_what_the_budget_does_not_account_for_is_told_in_tokens(explain):
    told, _ = explain(T4.replace("KV Cache is 2.36GiB", "KV Cache is 1.36GiB"))
    (one,) = told["findings"]
    assert one["cause"] == "not accounted for"
    assert one["text"].startswith("1.00 GiB less than 0.5 of 14.56 GiB")
    assert "KV Cache is 1.36GiB" in one["line"]


def test_an_estimate_of_graphs_that_costs_cache_is_told_with_the_tokens_lost(explain):
    told, shown = explain(ENABLED)
    (one,) = told["findings"]
    assert one["cause"] == "graph estimate"
    assert "4.20 GiB and take 573.44 MiB: 3.64 GiB of the cache are lost, 306," in one["text"]
    assert "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0" in shown
    assert "0.56 GiB (actual)" in one["line"]
    close = ENABLED.replace("4.2 GiB", "0.60 GiB").replace("4.20 GiB", "0.60 GiB")
    assert explain(close)[0]["findings"] == []
    less = ENABLED.replace("0.56 GiB", "7.46 GiB")
    assert "3.26 GiB come out of what gpu_memory_utilization leaves free" in explain(less)[0]["findings"][0]["text"]


def test_only_the_last_start_of_a_log_counts(explain):
    told, _ = explain(ENABLED.replace("13.50", "1.25").replace("1,135,957", "105,181") + ENABLED)
    assert told["tokens"] == 1_135_957


@pytest.mark.parametrize(("free", "causes"), [("31.23", []), ("22.40", ["another process"])])
def test_a_card_that_is_in_use_before_the_start(explain, free, causes):
    line = f"ValueError: Free memory on device ({free}/31.86 GiB) on startup is less than desired.\n"
    told, _ = explain(ENABLED.replace("4.2 GiB", "0.6 GiB").replace("4.20", "0.60") + line)
    assert [one["cause"] for one in told["findings"]] == causes


def test_a_share_smaller_than_the_weights(explain):
    told, _ = explain(ENABLED.replace("13.50 GiB", "-14.28 GiB").split("(EngineCore pid=7) INFO 07-01 04:24:37 [kv")[0])
    (one,) = told["findings"]
    assert one["cause"] == "settings"
    assert "must be 14.28 GiB more before there is a cache" in one["text"]


def test_the_warm_up_of_the_sampler(explain):
    line = "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try\n"
    told, _ = explain(ENABLED.replace("4.2 GiB", "0.6 GiB").replace("4.20", "0.60") + line)
    (one,) = told["findings"]
    assert one["cause"] == "sampler"
    assert "with 1,024 requests" in one["text"]


def test_layers_that_keep_less_than_every_token(explain):
    told, _ = explain(
        "INFO [gpu_worker.py:349] Available KV cache memory: 2.30 GiB\n"
        "INFO [kv_cache_utils.py:1229] GPU KV cache size: 75,840 tokens\n"
        "INFO [kv_cache_utils.py:1234] Maximum concurrency for 120,000 tokens per request: 2.48x\n"
    )
    (one,) = told["findings"]
    assert one["cause"] == "layers"
    assert one["text"].startswith("0.63 requests of 120,000 tokens would fit by the tokens, and 2.48 do")


@pytest.mark.parametrize(
    ("after", "half", "causes"),
    [
        ("6.09", "1.42", []),
        ("6.09", "0.42", ["not accounted for"]),
        ("4.59", "0.67", ["another process"]),
    ],
)
def test_sglang_by_its_fraction_and_what_was_free(explain, after, half, causes):
    told, shown = explain(SGLANG.format(after=after, half=half))
    assert (told["engine"], told["num_ranks"], told["tokens"], told["length"]) == ("SGLang", 4, 46_611, 131_072)
    assert told["cache_bytes"] == 2 * round(float(half) * GIB)
    assert [one["cause"] for one in told["findings"]] == causes
    assert "mem_fraction_static 0.85" in shown


def test_all_graphs_of_sglang_count_once(explain):
    """Of lines of 0.5.12, 0.5.14 and later, which capture those of a decode and of a prefill apart, on each rank."""
    captures = [
        f"[2026-11-29 22:03:0{second} TP{rank}] Capture {kind} end. elapsed={second}.23 s, mem usage={used} GB, "
        f"avail mem={free} GB.\n"
        for second, kind, used, free in [(7, "target decode cuda graph", "0.30", "13.01"),
                                         (9, "piecewise CUDA graph", "0.91", "12.10")]
        for rank in range(2)
    ]  # fmt: skip
    start = SGLANG[: SGLANG.index("[2025-03-08 12:29:28 TP0] Capture")].format(after="6.09", half="1.42")
    told, _ = explain(start.replace("#tokens", "dtype: torch.bfloat16, #tokens") + "".join(captures))
    assert told["tokens"] == 46_611
    assert told["graphs_bytes"] == round(0.30 * GIB) + round(0.91 * GIB)
    assert told["free_at_end_bytes"] == round(12.10 * GIB)
