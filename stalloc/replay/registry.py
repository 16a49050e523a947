"""The models by name: what `stalloc simulate` can compare.

Contract: a name and a text of settings ("key:value,…") give a model or one BadInputError; a model's code is imported,
and compiled, only when it is asked for.
"""

import importlib
from collections.abc import Callable
from typing import Any

from stalloc.errors import BadInputError
from stalloc.replay.protocol import Allocator

#: name -> module, class; the module's `parse_settings` reads the class's settings
_MODELS = {
    "torch": ("torch_caching", "TorchCaching"),
    "expandable": ("torch_caching", "TorchCaching"),
    "stalloc": ("planned", "Planned"),
    "cupy": ("cupy_pool", "CupyPool"),
    "gmlake": ("gmlake", "GMLake"),
    "bfc": ("bfc", "BFC"),
    "rmm_pool": ("rmm_pool", "RmmPool"),
    "rmm_arena": ("rmm_arena", "RmmArena"),
    "rmm_binning": ("rmm_binning", "RmmBinning"),
    "stream_ordered": ("stream_ordered", "StreamOrdered"),
    "tlsf": ("tlsf", "TLSF"),
    "contiguous": ("contiguous", "Contiguous"),
    "compacting": ("compacting", "Compacting"),
}
_ALWAYS = {"expandable": "expandable_segments:True"}  #: settings that a name stands for


def _factory(name: str) -> Callable[[str, int], Allocator]:
    module_name, class_name = _MODELS[name]

    def build(settings: str = "", capacity_bytes: int = 0) -> Allocator:
        try:
            module: Any = importlib.import_module(f"stalloc.replay.{module_name}")
        except ModuleNotFoundError as error:
            if error.name != f"stalloc.replay.{module_name}":
                raise
            raise BadInputError(f"this stalloc has no model of {name}: leave it out.") from None
        text = ",".join(filter(None, (settings, _ALWAYS.get(name, ""))))
        model: Allocator = getattr(module, class_name)(module.parse_settings(text), capacity_bytes)
        return model

    return build


#: name -> factory of (settings as text, capacity in bytes, 0 for no limit)
ALLOCATORS: dict[str, Callable[[str, int], Allocator]] = {name: _factory(name) for name in _MODELS}


def make(name: str, settings: str = "", capacity_bytes: int = 0) -> Allocator:
    """A fresh model. Raises BadInputError for a name or a setting that does not exist and for a negative capacity."""
    if name not in ALLOCATORS:
        raise BadInputError(f"there is no model of an allocator {name!r}: the models are {', '.join(ALLOCATORS)}.")
    return ALLOCATORS[name](settings, capacity_bytes)
