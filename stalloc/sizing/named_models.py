"""The configuration of a language model by its name: one of a few that are known here, or one that transformers has.

Contract: nothing is asked of the network unless `download` is set, and no code that comes with a model is run.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError, SetupError
from stalloc.inputs import read_input
from stalloc.printable import printable


def _like_llama(
    kind: str, width: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_positions": 1024},
    "gpt2-xl": {"model_type": "gpt2", "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-2-7b": _like_llama("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3-8b": _like_llama("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _like_llama("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.2-1b": _like_llama("llama", 2048, 8192, 16, 32, 8, 128256, 131072, tie_word_embeddings=True),
    "mistral-7b": _like_llama("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "qwen2.5-0.5b": _like_llama("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-7b": _like_llama("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen3-8b": _like_llama("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
}
"""Published configurations, as far as they decide sizes; what is left out is transformers' default."""


def configuration(name: str, *, download: bool = False) -> dict[str, Any]:
    """What transformers' AutoConfig is made of, `model_type` among it.

    `name` is one of KNOWN, a config.json or a folder with one, or a model of the Hugging Face hub: its configuration is
    read from the user's cache, or fetched if `download` is set. Raises BadInputError where there is none, and
    SetupError where transformers is missing.
    """
    if find_spec("transformers") is None:
        raise SetupError("--model needs transformers: pip install transformers.")
    if name.lower() in KNOWN:
        return dict(KNOWN[name.lower()])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInputError(f"{printable(name)} is a folder without a config.json: {_CHOICES}.")
    elif not path.is_file():
        path = _of_hub(name, download)
    try:
        found = json.loads(read_input(path, "a model's configuration"))
    except ValueError as error:
        raise BadInputError(f"{printable(str(path))} is not JSON ({printable(str(error))}): {_CHOICES}.") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise BadInputError(
            f"{printable(str(path))} has no model_type, so it is no configuration of transformers: {_CHOICES}."
        )
    return found


def _of_hub(name: str, download: bool) -> Path:
    """Where the configuration of a model of the hub lies."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise BadInputError(f"there is no model {printable(name)!r}: {_CHOICES}.")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str) and os.path.isfile(found):
            return Path(found)
        if not download:
            raise BadInputError(
                f"the configuration of {printable(name)} is not in the cache of huggingface_hub: add --download, which "
                f"fetches it (no weights), or {_CHOICES}."
            )
        return Path(hf_hub_download(name, "config.json"))
    except HFValidationError as error:
        raise BadInputError(
            f"{printable(name)!r} is no name of the hub ({printable(str(error))}): {_CHOICES}."
        ) from None
    except (OSError, RuntimeError) as error:  # what requests and the hub raise: no such model, no access, no network
        reason = printable(str(error).strip().partition("\n")[0])
        raise BadInputError(
            f"the configuration of {printable(name)} cannot be fetched ({reason}): {_CHOICES}."
        ) from None


_CHOICES = f"give a config.json, a folder with one, or one of {', '.join(KNOWN)}"
