"""The models by name: what `stalloc simulate` can compare.

Contract: a name and a text of settings ("key:value,…") give a model or one BadInputError; a model's code is imported,
and compiled, only when it is asked for.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from stalloc.errors import BadInputError
from stalloc.replay.protocol import Allocator
from stalloc.replay.settings import read_settings

#: name -> module, class; settings are read by the module's `parse_settings`, or by the fields of their dataclass
_MODELS = {
    "torch": ("torch_caching", "TorchCaching"),
    "expandable": ("torch_caching", "TorchCaching"),
    "stalloc": ("planned", "Planned"),
    "cupy": ("cupy_pool", "CupyPool"),
    "gmlake": ("gmlake", "GMLake"),
    "bfc": ("bfc", "BFC"),
    "rmm_pool": ("rmm_pool", "RmmPool"),
    "rmm_arena": ("rmm_arena", "RmmArena"),
    "rmm_binning": ("rmm_pool", "RmmBinning"),
    "stream_ordered": ("stream_ordered", "StreamOrdered"),
    "tlsf": ("tlsf", "TLSF"),
    "contiguous": ("contiguous", "Contiguous"),
    "compacting": ("compacting", "Compacting"),
}
_ALWAYS = {"expandable": "expandable_segments:True"}  #: settings that a name stands for


def _factory(name: str) -> Callable[[str, int], Allocator]:
    module_name, class_name = _MODELS[name]

    def build(settings: str = "", capacity_bytes: int = 0) -> Allocator:
        module: Any = importlib.import_module(f"stalloc.replay.{module_name}")
        text = ",".join(filter(None, (settings, _ALWAYS.get(name, ""))))
        kind = getattr(module, class_name)
        parse = getattr(module, "parse_settings", partial(read_settings, kind.name, kind.settings_type))
        model: Allocator = kind(parse(text), capacity_bytes)
        return model

    return build


#: name -> factory of (settings as text, capacity in bytes, 0 for no limit)
ALLOCATORS: dict[str, Callable[[str, int], Allocator]] = {name: _factory(name) for name in _MODELS}


def make(name: str, settings: str = "", capacity_bytes: int = 0) -> Allocator:
    """A fresh model. Raises BadInputError for a name or a setting that does not exist and for a negative capacity."""
    if name not in ALLOCATORS:
        raise BadInputError(f"there is no model of an allocator {name!r}: the models are {', '.join(ALLOCATORS)}.")
    return ALLOCATORS[name](settings, capacity_bytes)
