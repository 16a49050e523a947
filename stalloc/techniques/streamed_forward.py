"""The passes of blocks whose parameters are streamed: when each is brought, and when its memory goes.

Contract: memory is let go at fixed points: after a block's forward pass, and in backward once every gradient that uses
it is there. What this cannot be right for is an error in one sentence: gradients of gradients, and a block that is
called several times for one backward pass onto gradients of an earlier one, which would be summed in another order.
Nothing here keeps a model or its blocks alive; their layers live on while a graph may need them. A parameter whose
memory somebody else has a part of (tied weights), or that is no plain dense tensor, stays on the device; a block that
finds no room elsewhere stays there whole. Microbatches (Pudipeddi et al., L2L, 2020, algorithm 3) give what a loop over
them around the whole model would: what a block makes of each, and gradients that are added from the first to the last.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stalloc.errors import StreamError
from stalloc.techniques.disk_store import DiskStore
from stalloc.techniques.forward_rows import ExchangedForward
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.parameters import Parameters, has_gradient
from stalloc.techniques.repeated_blocks import Block, why_not
from stalloc.techniques.streamed_layers import StreamedLayer, find_home
from stalloc.techniques.transfers import phase

_ADVICE = "Stream this model without microbatches."
_CONSUMERS = "_stalloc_consumers"  # of a tensor that a block made: calls that were given it
_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


class Streaming:
    """The blocks of one model, in their order. `window` of them are on the device at once, one at the least. Each takes
    a batch in so many microbatches."""

    def __init__(
        self, blocks: Sequence[Block], layers: Sequence[StreamedLayer], window: int, microbatches: int = 1
    ) -> None:
        self.microbatches = microbatches
        self._layers = [weakref.ref(layer) for layer in layers]
        self._ahead = max(window - 1, 0)
        self._backward = -1  # the number of the backward pass under way
        self._had_gradients: dict[int, bool] = {}  # whether a block had gradients before its backward in this pass
        self._hooks: list[Any] = []
        self._heard: set[int] = set()  # ids of parameters whose gradients are noted
        self._blocks = [weakref.ref(block.module) for block in blocks]
        for place, block in enumerate(blocks):
            block.module.forward = _Forward(self, place, block.module)

    @property
    def layers(self) -> list[StreamedLayer]:
        return [layer for one in self._layers if (layer := one()) is not None]

    def undo(self) -> None:
        """Give every block its own forward back, and its parameters to the device."""
        for one in self._blocks:
            block: Any = one()
            forward = None if block is None else vars(block).get("forward")
            if isinstance(forward, _Forward):
                forward.undo()
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.bring_home()

    def layer(self, place: int) -> StreamedLayer | None:
        """The layer of a block, by its place; None where there is none, or its parameters are gone."""
        return self._layers[place]() if 0 <= place < len(self._layers) else None

    def need(self, place: int, direction: int) -> None:
        """A block is about to compute: bring it, and begin to bring those that come next in this direction."""
        pass_name = "forward" if direction > 0 else "backward"
        for offset in range(self._ahead + 1):
            at = place + direction * offset
            if (layer := self.layer(at)) is not None:
                with phase(f"{pass_name}/{at}"):
                    layer.load()
        if (needed := self.layer(place)) is not None:
            needed.wait()

    def num_trained(self, place: int) -> int:
        """How many parameters of a block require gradients now; each one's gradient is noted from here on."""
        if (layer := self.layer(place)) is None:
            return 0
        trained = [one for one in layer.parameters if one.requires_grad]
        for parameter in trained:
            if id(parameter) not in self._heard:
                self._heard.add(id(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _: self.came(layer)))
        return len(trained)

    def backward_begins(self, call: "_Call") -> None:
        """Begin the backward pass of a call of a block, whose results have their gradients."""
        if (layer := call.layer) is None:
            return
        if torch.is_grad_enabled():
            raise StreamError(
                f"{layer.name} is streamed, and gradients of its gradients are asked for (create_graph=True): do not "
                "stream this model."
            )
        number = torch._C._current_graph_task_id()
        if number != self._backward:  # layers whose gradients do not all come are released at its end
            self._backward = number
            self._had_gradients.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if (had_gradients := self._had_gradients.get(call.place)) is None:
            self._had_gradients[call.place] = any(map(has_gradient, layer.parameters))
        elif had_gradients:
            raise StreamError(
                f"{layer.name} is streamed, and is called twice before one backward pass that adds to gradients: sums "
                "would be made in another order. Do not stream this model, or call backward for each."
            )
        layer.waiting += call.num_trained + call.num_given
        self.need(call.place, -1)

    def came(self, layer: StreamedLayer | None) -> None:
        if layer is not None and layer.waiting:
            layer.waiting -= 1
            if not layer.waiting:
                layer.release()

    def _end_backward(self) -> None:
        self._backward = -1
        for layer in self.layers:
            layer.release()


class _Call:
    """One call of a block, with gradients; it is told when each tensor that it was given has its gradient."""

    def __init__(self, streaming: Streaming, place: int) -> None:
        self._streaming, self.place = streaming, place
        self.layer = streaming.layer(place)  # which backward needs, whatever has become of the model
        self.num_trained = streaming.num_trained(place)
        self.num_given = 0
        self._backward = -1  # the number of the backward pass in which its gradients came

    def given(self, values: Any) -> None:
        for tensor in _with_gradients(values):
            self.num_given += 1
            if (consumers := getattr(tensor, _CONSUMERS, None)) is None:
                tensor.register_hook(lambda _: self.done())
            else:  # its maker hears of the gradient first
                consumers.append(self)

    def made(self, results: Any) -> None:
        for tensor in _with_gradients(results):
            consumers: list[_Call] = []  # which the tensor is given to, and which are told first
            tensor.register_hook(functools.partial(self._begin, consumers))
            setattr(tensor, _CONSUMERS, consumers)

    def _begin(self, consumers: "list[_Call]", _: torch.Tensor) -> None:
        for one in consumers:
            one.done()
        number = torch._C._current_graph_task_id()
        if self._backward != number:
            self._backward = number
            self._streaming.backward_begins(self)

    def done(self) -> None:
        """Note that a tensor that it was given has its gradient, which need not have come through this call."""
        if self._backward == torch._C._current_graph_task_id():
            self._streaming.came(self.layer)


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]


class _Forward(ExchangedForward):
    """What takes the place of a block's `forward`."""

    def __init__(self, streaming: Streaming, place: int, block: Any) -> None:
        self._weak_block = weakref.ref(block)
        super().__init__(block)
        for name in ("__wrapped__", "_module"):  # which hold the block
            vars(self).pop(name, None)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(block.forward)
        self._streaming, self._place = streaming, place

    def __getattr__(self, name: str) -> Any:
        if name == "_module":
            block = self._weak_block()
            assert block is not None, "its own attribute is called"
            return block
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        streaming, place = self._streaming, self._place
        streaming.need(place, 1)
        in_backward = torch._C._current_graph_task_id() != -1  # the program itself computes its block again
        call = _Call(streaming, place) if torch.is_grad_enabled() and not in_backward else None
        if call is not None:
            call.given((args, kwargs))
        layer = streaming.layer(place)
        name = f"block {place}" if layer is None else layer.name
        results = _in_microbatches(self.original, streaming.microbatches, name, args, kwargs)
        if call is not None:
            call.made(results)
        if layer is not None and not in_backward:
            layer.release()
        return results

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copy of the block, as it is without streaming: a copy's parameters are not streamed."""
        if self._instance_forward is not None:
            return copy.deepcopy(self._instance_forward, memo)
        block = copy.deepcopy(self._module, memo)
        return type(block).forward.__get__(block)


def stream_blocks(
    model: Any,
    blocks: Sequence[Block],
    store: HostStore,
    window: int,
    disk: DiskStore | None = None,
    microbatches: int = 1,
) -> tuple[Streaming | None, str]:
    """Stream the blocks of a model that can be streamed; also returns why others, or all, stay on the device. What has
    no room in `store` goes to `disk`."""
    if type(model).__name__ in _PARALLEL or hasattr(model, "_get_fsdp_state"):
        return None, f"{type(model).__name__} has a hold of the parameters of its blocks"
    chosen, layers, reason = [], [], ""
    for block in blocks:
        parameters, why = streamable(model, block)
        home = None if why else find_home(parameters, store, disk)
        if home is None:
            where = "in host memory" if disk is None else "in host memory or on the disk"
            reason = reason or why or f"there is no room {where} for {block.name}"
            continue
        chosen.append(block)
        layers.append(StreamedLayer(block.name, parameters, home))
    return (Streaming(chosen, layers, window, microbatches) if chosen else None), reason


def streamable(model: Any, block: Block) -> tuple[Parameters, str]:
    """The parameters of a block that can be streamed, and why none can."""
    # others than plain ones, as of FSDP2, have no memory of their own
    plain = [one for _, one in model.named_parameters(remove_duplicate=False) if type(one) is torch.nn.Parameter]
    users = Counter(
        one.untyped_storage().data_ptr() for one in plain
    )  # others, as of FSDP2, have no memory of their own
    parameters = [one for one in block.module.parameters() if _can_be(one, users)]
    why = why_not(block)
    if not why and not parameters:
        why = f"{block.name} has no parameters of its own on a device, whose memory can be let go"
    if not why and len({one.device for one in parameters}) > 1:
        why = f"{block.name} lies on several devices"
    return ([] if why else parameters), why


def _can_be(parameter: Any, users: "Counter[int]") -> bool:
    if type(parameter) is not torch.nn.Parameter:
        return False
    storage = parameter.untyped_storage()
    is_own = users[storage.data_ptr()] == 1 and storage.nbytes() == parameter.nbytes
    return parameter.numel() > 0 and is_own and storage.resizable()


def why_not_in_microbatches(block: Any) -> str:
    """Why a block cannot take a batch in parts; empty if nothing shows that it cannot."""
    for name, module in block.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name or type(module).__name__} normalizes over the whole batch"
    return ""


def _in_microbatches(
    call: Callable[..., Any], number: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a block with a batch in `number` parts, or in as many as it has rows. The first dimension of the first
    tensor counts the rows of the batch; other tensors with as many rows are divided too. Raises StreamError."""
    first = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.dim()), None)
    rows = 0 if first is None else len(first)
    number = min(number, rows)
    if number < 2:
        return call(*args, **kwargs)
    begins = [rows * part // number for part in range(number + 1)]
    before = _random_state(first)
    parts: list[Any] = []
    for begin, end in reversed(list(itertools.pairwise(begins))):  # backward begins with what came last

        def rows_of(value: Any, begin: int = begin, end: int = end) -> Any:
            is_batch = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
            return value[begin:end] if is_batch else value

        part = call(*tree_map(rows_of, args), **tree_map(rows_of, kwargs))
        for one in tree_leaves(part):
            if not isinstance(one, torch.Tensor) or not one.dim() or len(one) != end - begin:
                raise StreamError(
                    f"{name} makes something else of {end - begin} rows of a batch than as many rows. {_ADVICE}"
                )
        parts.insert(0, part)
    if any(not torch.equal(one, other) for one, other in zip(before, _random_state(first), strict=True)):
        raise StreamError(f"{name} draws random numbers, in another order for microbatches. {_ADVICE}")
    flat = [tree_flatten(part) for part in parts]
    return tree_unflatten([torch.cat(values) for values in zip(*(one for one, _ in flat), strict=True)], flat[0][1])


def _random_state(tensor: Any) -> list[torch.Tensor]:
    of_device = [torch.cuda.get_rng_state(tensor.device)] if tensor.is_cuda else []
    return [torch.get_rng_state(), *of_device]
