"""PYTORCH_ALLOC_CONF: which of torch's variables counts, and its pairs of key and value.

What the settings mean is said where they are used; here their text is taken apart, once. Nothing else of stalloc is
imported.
"""

import os
import re
from collections.abc import Mapping, Sequence

#: in torch's order of precedence: it reads the first of these that is set
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


_FIRST_WITH_NEW_NAME = 2, 9  # releases of torch before it read the second and third only


def variables_read(release: str) -> tuple[str, ...]:
    """The variables that a release of torch ("2.11.0+cu130") looks at, in its order; of an unknown one, a new one's."""
    number = re.match(r"(\d{1,4})\.(\d{1,4})", release)
    is_older = number is not None and (int(number[1]), int(number[2])) < _FIRST_WITH_NEW_NAME
    return VARIABLES[1:] if is_older else VARIABLES


def variable_to_set(release: str) -> str:
    """The variable to name to somebody who runs a release of torch: of an unknown one the one that all of them read."""
    return variables_read(release)[0] if release else VARIABLES[1]


def has_expandable_segments(release: str) -> bool:
    """Whether a release of torch knows the setting, which those until 2.0 stop at; so does an unknown one."""
    number = re.match(r"(\d{1,4})\.(\d{1,4})", release)
    return number is None or (int(number[1]), int(number[2])) >= (2, 1)


def conf_in_force(
    environment: Mapping[str, str] = os.environ, variables: Sequence[str] = VARIABLES
) -> tuple[str, dict[str, str]]:
    """The variable that torch goes by and its settings by name; ("", {}) if none is set."""
    for variable in variables:
        if text := environment.get(variable, ""):
            pairs = (part.partition(":") for part in split_conf(text))
            return variable, {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return "", {}


def conf_text(settings: Mapping[str, str]) -> str:
    """The settings as the variable has them."""
    return ",".join(f"{name}:{value}" for name, value in settings.items())


def split_conf(text: str) -> list[str]:
    """The parts of a text between commas; a comma in brackets belongs to its part."""
    return re.split(r",(?![^\[]*\])", text)
