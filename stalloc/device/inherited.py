"""What a new interpreter that a program on the virtual GPU starts runs first: it has the virtual GPU too.

Contract: this file is copied beside the virtual GPU's libraries as sitecustomize.py, in a folder that PYTHONPATH names;
Python runs it at its start, and then the sitecustomize.py that it would have run. Nothing of stalloc is loaded but what
waits for the import of torch or CuPy. What goes wrong costs one sentence, never the program.
"""

import os
import sys


def _inherit() -> None:
    import json

    told = json.loads(os.environ["STALLOC_VIRTUAL_GPU"])  # the folder that stalloc is in, and the GPU
    if told["folder"] not in sys.path:
        sys.path.append(told["folder"])
    from stalloc.imports import before_import
    from stalloc.notices import say

    def activate() -> None:
        try:
            from stalloc import device

            if device.active() is None:
                gpu = told["gpu"] | {"compute_capability": tuple(told["gpu"]["compute_capability"])}
                device.activate("virtual", device.VirtualGPU(**gpu))
        except Exception as error:
            say(f"a process that the program started has no virtual GPU: {str(error).rstrip('.')}.")

    before_import(("torch", "cupy", "cupy_backends"), activate)


def _run_next() -> None:
    """Run the sitecustomize.py that comes after this one on Python's path."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        _inherit()
    except Exception as failure:
        sys.stderr.write(f"stalloc: a process that the program started has no virtual GPU: {failure!r}.\n")
    _run_next()
