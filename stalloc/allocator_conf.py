"""PYTORCH_ALLOC_CONF: which of torch's variables counts, and its pairs of key and value.

What the settings mean is said where they are used; here their text is taken apart, once. Nothing else of stalloc is
imported.
"""

import os
import re
from collections.abc import Mapping

#: in torch's order of precedence: it reads the first of these that is set
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def conf_in_force(environment: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str]]:
    """The variable that torch goes by and its settings by name; ("", {}) if none is set."""
    for variable in VARIABLES:
        if text := environment.get(variable, ""):
            pairs = (part.partition(":") for part in split_conf(text))
            return variable, {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return "", {}


def split_conf(text: str) -> list[str]:
    """The parts of a text between commas; a comma in brackets belongs to its part."""
    return re.split(r",(?![^\[]*\])", text)
