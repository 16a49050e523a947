"""`stalloc dryrun --model`: an estimate from a model's name, without a script."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_stalloc, run_warm

has_transformers = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not has_transformers, reason="transformers is not installed")
needs_virtual_gpu = pytest.mark.usefixtures("cupy_installed", "cuda_torch")

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TINY_PARAMETERS = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with the configuration of a small model, as transformers saves it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def dryrun(*words: object, folder: Path, code: int = 0, **variables: str) -> tuple[Any, str]:
    """The JSON object, and what was said on both streams."""
    out = folder / "result.json"
    told = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")} | variables
    done = run_stalloc("dryrun", "--json", out, "--headroom", "0", *words, folder=folder, variables=told)
    assert done.returncode == code, done.stderr
    return json.loads(out.read_text()) if out.exists() else None, done.stdout + done.stderr


@pytest.mark.skipif(has_transformers, reason="transformers is installed")
def test_what_is_missing_is_said_without_transformers(tmp_path: Path) -> None:
    _, said = dryrun("--model", "llama-3-8b", folder=tmp_path, code=2)
    assert said == "stalloc: --model needs transformers: pip install transformers.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--batch", "4", "train.py"), "--batch needs --model NAME."),
        (("--infer", "train.py"), "--infer needs --model NAME."),
        (("--model", "gpt2", "train.py"), "leave out the script, or --model."),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "train.py").write_text("")
    _, said = dryrun(*words, folder=tmp_path, code=2)
    assert said.startswith("stalloc: ")
    assert said.count("\n") == 1
    assert sentence in said


@needs_transformers
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--model", "lama-3-8b"),
            "there is no model 'lama-3-8b': give a config.json, a folder with one, or one of gpt2",
        ),
        (("--model", "someone/unknown"), "is not in the cache of huggingface_hub: add --download"),
        (("--model", "."), "is a folder without a config.json"),
        (("--model", "broken.json"), "broken.json is not JSON"),
        (("--model", "list.json"), "list.json has no model_type"),
        (("--model", "gpt2", "--batch", "0"), "--batch is '0': give a number from 1."),
        (("--model", "gpt2", "--infer", "--train", "sgd"), "--infer is without --train and --checkpoint"),
        (("--model", "gpt2", "--seq", "1025"), "gpt2 is made for 1,024 tokens in a sequence, not 1,025"),
        (("--model", "gpt2", "--find", "layers=1..4"), "--find with --model takes batch, seq or gpu"),
    ],
)
def test_models_and_options_that_cannot_be_are_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    _, said = dryrun(*words, folder=tmp_path, code=2, HF_HOME=str(tmp_path))
    assert said.startswith("stalloc: ")
    assert said.count("\n") == 1
    assert sentence in said


@needs_transformers
@needs_virtual_gpu
def test_parameters_gradients_and_state_of_a_small_model_are_counted(tiny: Path) -> None:
    result, said = dryrun(
        "--model", tiny, "--dtype", "fp32", "--train", "adamw", "--batch", "2", "--seq", "64", folder=tiny
    )
    native = result["native"]
    assert native["allocated_peak_bytes"] > 16 * TINY_PARAMETERS  # parameters, gradients, two moments
    assert all(result[name]["fits"] for name in ("native", "expandable", "stalloc"))
    assert result["uncertain"]["decisions"] == []
    assert "next: stalloc run -m stalloc.sizing.model_program" in said


@needs_transformers
@needs_virtual_gpu
@pytest.mark.slow
def test_each_way_to_run_needs_what_it_keeps(tiny: Path) -> None:
    def allocated(*words: str) -> int:
        program = ("-m", "stalloc.sizing.model_program", tiny / "config.json", "--batch", "8", "--seq", "256")
        done = run_stalloc(
            "run", "--device", "virtual", "--json", out, *program, "--dtype", "fp32", *words, folder=tiny
        )
        assert done.returncode == 0, done.stderr
        return int(json.loads(out.read_text())["devices"][0]["run_allocated_peak_bytes"])

    out = tiny / "run.json"

    adamw, sgd = allocated("--train", "adamw-fused"), allocated("--train", "sgd")
    assert adamw - sgd == pytest.approx(8 * TINY_PARAMETERS, rel=0.05)  # two moments
    assert allocated("--train", "sgd", "--checkpoint") < sgd
    assert allocated("--infer") < sgd - 4 * TINY_PARAMETERS  # no gradients


@needs_transformers
@needs_virtual_gpu
@pytest.mark.slow
def test_the_largest_batch_of_a_model_is_found(tiny: Path) -> None:
    words = ("--model", tiny, "--seq", "256", "--find", "batch=1..64", "--memory", "160MiB")
    result, said = dryrun(*words, folder=tiny)
    found = {name: result[name]["largest"] for name in ("native", "expandable", "stalloc")}
    assert 1 < min(found.values()) <= max(found.values()) <= result["needed"]["largest"] < 64
    assert f"--batch {found['stalloc']} " in said


@needs_transformers
@needs_virtual_gpu
@pytest.mark.slow
def test_a_rank_holds_its_part_of_a_model(tiny: Path) -> None:
    words = ("--model", tiny, "--seq", "64", "--dtype", "fp32", "--ranks", "4", "--rank", "0")
    result, _ = dryrun(*words, folder=tiny)
    whole, _ = dryrun(*words[:-4], folder=tiny)
    assert 4 * TINY_PARAMETERS < result["ranks"][0]["needed_bytes"] < whole["native"]["allocated_peak_bytes"]


@needs_transformers
def test_known_models_have_their_published_numbers_of_parameters() -> None:
    from stalloc.sizing.model_program import KNOWN

    source = (
        "import json, sys, torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from stalloc.sizing.model_program import KNOWN\n"
        "counts = {}\n"
        "for name, found in KNOWN.items():\n"
        "    with torch.device('meta'):\n"
        "        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**found))\n"
        "    counts[name] = sum(parameter.numel() for parameter in model.parameters())\n"
        "print(json.dumps(counts))\n"
    )
    done = run_warm(source)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts == PUBLISHED
    assert set(KNOWN) == set(PUBLISHED)
