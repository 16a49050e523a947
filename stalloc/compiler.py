"""numba's compiler with less to do: what our compiled functions do not use is left out.

Contract: the machine code is what numba's own passes make of the same function; only time is saved. Compiled functions
here have no closures, comprehensions, generators, `with` or dynamic exceptions and test no argument for None. One that
does fails to compile: add the pass that it needs.

Three things are spared. Passes that find nothing to do, each of which is followed by a new analysis of the function.
Asking dozens of overloads, each time anew, what the sum of two integers is. And optimizing a function by itself that is
optimized once more as a part of those that call it.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba import types
from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import FunctionPass, LoweringPass, PassManager, _pass_registry, register_pass
from numba.core.ir_utils import build_definitions
from numba.core.ssa import reconstruct_ssa
from numba.extending import _Intrinsic

from stalloc.garbage import fewer_collections

_OPERATORS = {*filter(callable, vars(operator).values()), bool}
_resolved: dict[Any, Any] = {}


def _depends_on_types_alone(func: Any, signature: Any) -> bool:
    """Whether what was found is an operator of numba's own or an intrinsic; overloads also depend on options."""
    return isinstance(func.typing_key, _Intrinsic) or func.get_impl_key(signature) in _OPERATORS


@contextmanager
def _remembering_operators() -> Iterator[None]:
    """Let numba remember what operators and intrinsics give for arguments of which types."""
    if types.Function.get_call_type is _remembered:  # a function that is compiled for another
        yield
        return
    types.Function.get_call_type = _remembered
    try:
        yield
    finally:
        del types.Function.get_call_type


def _remembered(func: Any, context: Any, args: Any, kws: Any) -> Any:
    if kws:
        return types.BaseFunction.get_call_type(func, context, args, kws)
    key = context, func, tuple(args)
    if key not in _resolved:
        found = types.BaseFunction.get_call_type(func, context, args, kws)
        if found is None or not _depends_on_types_alone(func, found):
            return found
        _resolved[key] = found
    return _resolved[key]


@register_pass(mutates_CFG=False, analysis_only=False)
class _ReconstructSSA(untyped_passes.ReconstructSSA):
    """numba's pass, without the lifetimes of variables, which only the last pass before lowering needs."""

    _name = "stalloc_reconstruct_ssa"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _StripPhis(typed_passes.PreLowerStripPhis):
    """numba's pass, without the lifetimes of variables, as in `_ReconstructSSA`."""

    _name = "stalloc_strip_phis"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


class _Part(JITCodeLibrary):
    """The code of a function that only compiled code calls: no machine code, and nothing that it calls."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        for function in self._final_module.functions:  # it is in no engine, where others would need its names
            if not function.is_declaration and function.linkage.name == "external":
                function.linkage = "linkonce_odr"
        return self._final_module


def _with_parts(libraries: list[Any]) -> dict[Any, None]:
    found: dict[Any, None] = {}
    rest = list(reversed(libraries))
    while rest:
        library = rest.pop()
        if library not in found:
            found[library] = None
            if isinstance(library, _Part):
                rest += reversed(library._linking_libraries)
    return found


class _Whole(JITCodeLibrary):
    """The code of a function that Python calls, or C: with all that it calls, optimized at once."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in _with_parts(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()

    def _optimize_final_module(self) -> None:
        if any(function.name == "NRT_incref" for function in self._final_module.functions):
            super()._optimize_final_module()  # in two rounds, between which counted references are pruned
        else:
            passes, builder = self._codegen._module_pass_manager()
            passes.run(self._final_module, builder)


@register_pass(mutates_CFG=False, analysis_only=False)
class _BeginPart(FunctionPass):
    """Make no machine code of a function: it is optimized as a part of those that call it, once."""

    _name = "stalloc_begin_part"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        return False


@register_pass(mutates_CFG=False, analysis_only=False)
class _BeginWhole(FunctionPass):
    """Make machine code of a function with all that it calls."""

    _name = "stalloc_begin_whole"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = _Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return False


@register_pass(mutates_CFG=False, analysis_only=False)
class _NameUncallable(LoweringPass):
    """Give a function without machine code an entry point that is its own: numba finds functions by it."""

    _name = "stalloc_name_uncallable"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        # numba takes a builtin function only; this one is like no other, and raises whatever it is called with
        entry: Any = {}.__getitem__
        state.cr = state.cr._replace(cfunc=entry)
        state.targetctx.insert_user_function(entry, state.cr.fndesc, [state.library])
        return False


class _Passes(PassManager):
    """Passes that run one after the other, and nothing in between."""

    def run(self, state: Any) -> None:
        with fewer_collections(), _remembering_operators():
            for one in self.passes:
                run_pass = _pass_registry.get(one[0]).pass_inst
                run_pass.analysis = self._analysis
                run_pass.run_pass(state)


@cache
def _passes(part: bool) -> PassManager:
    passes = _Passes("part" if part else "whole")
    untyped = [
        untyped_passes.TranslateByteCode,
        untyped_passes.FixupArgs,
        untyped_passes.GenericRewrites,
        untyped_passes.InlineInlinables,
        _ReconstructSSA,
    ]
    typed = [typed_passes.NopythonTypeInference, _StripPhis, typed_passes.IRLegalization]
    lowering = [_BeginPart if part else _BeginWhole, typed_passes.NativeLowering]
    if part:
        lowering.append(_NameUncallable)
    for one in (*untyped, *typed, *lowering, typed_passes.NoPythonBackend):
        passes.add_pass(one, one.name())
    passes.finalize()
    return passes


class PartCompiler(CompilerBase):
    """Compiles what only compiled code calls, up to where machine code would be made."""

    def define_pipelines(self) -> list[Any]:
        return [_passes(True)]


class WholeCompiler(CompilerBase):
    """Compiles what is called from outside."""

    def define_pipelines(self) -> list[Any]:
        return [_passes(False)]
