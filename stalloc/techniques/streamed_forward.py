"""The passes of blocks whose parameters are streamed: when each is brought, and when its memory goes.

Contract: memory is let go at fixed points: after a block's forward pass, and in backward once every gradient that uses
it is there. What this cannot be right for is an error in one sentence: gradients of gradients, and a block that is
called several times for one backward pass onto gradients of an earlier one, which would be summed in another order.
Nothing here keeps a model or its blocks alive; their layers live on while a graph may need them.
"""

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.errors import StreamError
from stalloc.techniques.gradient_access import has_gradient
from stalloc.techniques.microbatches import in_microbatches
from stalloc.techniques.repeated_blocks import Block
from stalloc.techniques.streamed_layers import StreamedLayer
from stalloc.techniques.transfers import phase

_CONSUMERS = "_stalloc_consumers"  # of a tensor that a block made: calls that were given it


class Streaming:
    """The blocks of one model, in their order. `window` of them are on the device at once, one at the least.

    Each takes a batch in so many microbatches.
    """

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
        """The streamed layers whose parameters the program still has."""
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
            layer = self.layer(at)
            if layer is not None:
                with phase(f"{pass_name}/{at}"):
                    layer.load()
        needed = self.layer(place)
        if needed is not None:
            needed.wait()

    def num_trained(self, place: int) -> int:
        """How many parameters of a block require gradients now; each one's gradient is noted from here on."""
        layer = self.layer(place)
        if layer is None:
            return 0
        trained = [one for one in layer.parameters if one.requires_grad]
        for parameter in trained:
            if id(parameter) not in self._heard:
                self._heard.add(id(parameter))
                seen = functools.partial(self._gradient_came, layer)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(seen))
        return len(trained)

    def backward_begins(self, call: "_Call") -> None:
        """Begin the backward pass of a call of a block, whose results have their gradients."""
        layer = call.layer
        if layer is None:
            return
        if torch.is_grad_enabled():
            raise StreamError(
                f"{layer.name} is streamed, and gradients of its gradients are asked for (create_graph=True): do not "
                "stream this model."
            )
        self._begin_backward()
        had_gradients = self._had_gradients.get(call.place)
        if had_gradients is None:
            self._had_gradients[call.place] = any(map(has_gradient, layer.parameters))
        elif had_gradients:
            raise StreamError(
                f"{layer.name} is streamed, and is called twice before one backward pass that adds to gradients: sums "
                "would be made in another order. Do not stream this model, or call backward for each."
            )
        layer.waiting += call.num_trained + call.num_given
        self.need(call.place, -1)

    def came(self, layer: StreamedLayer | None) -> None:
        """Note that one of the gradients that a block waits for in backward has come."""
        if layer is not None and layer.waiting:
            layer.waiting -= 1
            if not layer.waiting:
                layer.release()

    def _gradient_came(self, layer: StreamedLayer, _: torch.Tensor) -> None:
        self.came(layer)

    def _begin_backward(self) -> None:
        """Prepare a backward pass, once for each: layers whose gradients did not all come are released at its end."""
        number = torch._C._current_graph_task_id()
        if number != self._backward:
            self._backward = number
            self._had_gradients.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

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

    def given(self, *values: Any) -> None:
        """Note the arguments of the call."""
        for tensor in _with_gradients(values):
            self.num_given += 1
            consumers = getattr(tensor, _CONSUMERS, None)
            if consumers is None:
                tensor.register_hook(lambda _: self.done())
            else:  # its maker hears of the gradient first
                consumers.append(self)

    def made(self, results: Any) -> None:
        """Note the results of the call."""
        for tensor in _with_gradients(results):
            setattr(tensor, _CONSUMERS, self._tell_of(tensor))

    def _tell_of(self, tensor: torch.Tensor) -> "list[_Call]":
        """Tell this call of the gradient of a tensor that it made, after the calls that the tensor is given to."""
        consumers: list[_Call] = []

        def begin(_: torch.Tensor) -> None:
            for one in consumers:
                one.done()
            number = torch._C._current_graph_task_id()
            if self._backward != number:
                self._backward = number
                self._streaming.backward_begins(self)

        tensor.register_hook(begin)
        return consumers

    def done(self) -> None:
        """Note that a tensor that it was given has its gradient, which need not have come through this call."""
        if self._backward == torch._C._current_graph_task_id():
            self._streaming.came(self.layer)


def _with_gradients(values: Any) -> list[torch.Tensor]:
    """The tensors in nested containers that require a gradient."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]


class _Forward:
    """What takes the place of a block's `forward`."""

    def __init__(self, streaming: Streaming, place: int, block: Any) -> None:
        functools.update_wrapper(self, block.forward)
        for name in ("__wrapped__", "_block"):  # which hold the block
            vars(self).pop(name, None)
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(block.forward)
        self._streaming, self._place, self._weak_block = streaming, place, weakref.ref(block)
        self._instance_forward = vars(block).get("forward")

    @property
    def _block(self) -> Any:
        block = self._weak_block()
        assert block is not None, "its own attribute is called"
        return block

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        if self._instance_forward is not None:
            return self._instance_forward(*args, **kwargs)
        block = self._block
        return type(block).forward(block, *args, **kwargs)

    def _in_parts(self, args: Any, kwargs: Any) -> Any:
        name = f"block {self._place}" if (layer := self._streaming.layer(self._place)) is None else layer.name
        return in_microbatches(self._inner, self._streaming.microbatches, name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the block with its parameters on the device."""
        streaming, place = self._streaming, self._place
        streaming.need(place, 1)
        if torch._C._current_graph_task_id() != -1:  # the program itself computes its block again in backward
            return self._in_parts(args, kwargs)
        call = _Call(streaming, place) if torch.is_grad_enabled() else None
        if call is not None:
            call.given(args, kwargs)
        results = self._in_parts(args, kwargs)
        if call is not None:
            call.made(results)
        layer = streaming.layer(place)
        if layer is not None:
            layer.release()
        return results

    def undo(self) -> None:
        """Put back what was there before."""
        if vars(self._block).get("forward") is self:
            if self._instance_forward is None:
                del self._block.forward
            else:
                self._block.forward = self._instance_forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copy of the block, as it is without streaming: a copy's parameters are not streamed."""
        if self._instance_forward is not None:
            return copy.deepcopy(self._instance_forward, memo)
        block = copy.deepcopy(self._block, memo)
        return type(block).forward.__get__(block)

    def __reduce__(self) -> Any:
        """A saved model is as the program made it, and is read without stalloc."""
        return getattr, (self._block, "forward")
