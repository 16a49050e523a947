"""How a program on the virtual GPU reads small integers and booleans, and what depends on their values.

Contract: each function here stands for one of torch's, makes the same requests in the same order, and lets the program
have what the host computed; a read of what is not known is counted with the line that read it.
"""

import functools
from collections.abc import Callable
from typing import Any

from stalloc.device.redispatch import below
from stalloc.device.values import LONGEST_NUMBER, MAX_NUMBERS, Values


def reader(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    decides = name in ("__bool__", "__int__", "__index__", "is_nonzero")

    @functools.wraps(function)
    def read(self: Any) -> Any:
        result = function(self)  # its requests, its waiting, and its errors
        if not self.is_cuda:
            return result
        host = values.read(self) if decides or self.dtype in values.kinds else values.read_data(self)
        if host is None:
            return result
        with values.unseen():
            return function(host)

    return read


def mover(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`to` and its kin: a copy to the host is a read, a copy on the GPU has the same elements."""

    same, kinds, plain, most = _original_to(values), values.kinds, values.plain, MAX_NUMBERS

    @functools.wraps(function)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs) if kwargs else function(self, *args)
        if result is self or type(self) not in plain or type(result) not in plain:
            return result
        if self.requires_grad or (self.numel() > most and self.dtype not in kinds):
            return result
        if result.is_cuda:
            if values.can_keep(result) and not values.learn_copy(result, self):
                values.learn(result, values.compute(same, (self, result.dtype), {}))
        elif self.is_cuda:
            host = values.read(self) if self.dtype in kinds else values.read_data(self)
            if host is not None:
                with values.torch.no_grad(), values.unseen():  # the copy by the driver wrote it, for whoever watches
                    result.copy_(host)
        return result

    return move


def _original_to(values: Values) -> Callable[..., Any]:
    return values.torch._C.TensorBase.to if hasattr(values.torch._C, "TensorBase") else values.torch._C._TensorBase.to


def copier(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def copy(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, source, *args, **kwargs)
        if values.is_followed(self) or values.knows(self):
            if not values.learn_copy(self, source):
                values.overwrite(self)
                computed = values.compute(function, (self, source), {})
                values.learn(self, None if computed is None else (self, computed[1]))
        elif not self.is_cuda and values.is_followed(source):
            host = values.read(source)
            if host is not None:
                with values.unseen():
                    function(self, host)
        return result

    return copy


def storage_copier(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """A storage's `copy_`, with which `torch.load` fills the GPU's, that learns single numbers, such as step counts."""

    @functools.wraps(function)
    def copy(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, source, *args, **kwargs)
        if self.device.type == "cuda" and source.device.type == "cpu" and 0 < self.nbytes() <= LONGEST_NUMBER:
            torch = values.torch
            with values.unseen():
                there, here = (torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in (self, source))
                values.learn_copy(there, here)
            values.knows_numbers = values.keeps_numbers = True
        return result

    return copy


def judge(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`equal` and its kin, which read one answer about two tensors."""

    @functools.wraps(function)
    def compare(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        result = function(a, b, *args, **kwargs)
        if not values.is_small(a):
            return result
        computed = values.compute(function, (a, b, *args), kwargs)
        values.decide(a, computed)
        return result if computed is None else computed[0]

    return compare


def coalescer(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`coalesce` of a sparse tensor, which reads how many different places it has."""

    @functools.wraps(function)
    def coalesce(self: Any) -> Any:
        if not self.is_cuda or self.is_coalesced():
            return function(self)
        indices = self._indices()
        computed = values.compute(values.torch.unique, (indices,), {"dim": 1})
        values.decide(indices, computed)
        with values.expecting(0 if computed is None else computed[0].shape[1]):
            result = function(self)
        values.learn(result._indices(), computed)
        return result

    return coalesce


def reader_of_lengths(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`ctc_loss`, which reads its lengths on the host before it begins.

    They are handed on as numbers: PyTorch's own reading is left out while a dispatch mode is active, and fails for
    lengths on the host.
    """

    @functools.wraps(function)
    def lose(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        if targets.dtype == values.torch.int64:  # with others it may be cuDNN's, which does not
            args = tuple(_on_host(values, one) for one in args)
            kwargs = {name: _on_host(values, one) for name, one in kwargs.items()}
        return function(log_probs, targets, *args, **kwargs)

    return lose


def _on_host(values: Values, value: Any) -> Any:
    """A tensor of numbers as PyTorch would read it on the host without a request, where it is known."""
    if type(value) is not values.torch.Tensor or value.dtype != values.torch.int64:
        return value
    host = value if value.is_cpu else values.read(value) if values.is_followed(value) else None
    return value if host is None else host.tolist()


def checker(values: Values, count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """What reads whether its arguments are in order: they are, where a `count` that it reads is the one given.

    `multinomial` did before torch 2.3, with the number of rows that are zero; `segment_reduce` does, with the shortest
    length.
    """

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        with values.expecting(count):
            return function(*args, **kwargs)

    return check


def scale_updater(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """The end of a step of GradScaler: no kernel computed an infinity, so the scale is that of a step without one."""

    @functools.wraps(function)
    def update(scale: Any, tracker: Any, found_inf: Any, *factors: Any) -> Any:
        if not values.knows(scale):
            return function(scale, tracker, found_inf, *factors)
        none = found_inf if values.knows(found_inf) else found_inf.new_zeros((), device="cpu")
        computed = values.compute(function, (scale, tracker, none, *factors), {})
        result = function(scale, tracker, found_inf, *factors)
        for changed in (scale, tracker):
            values.learn(changed, None if computed is None else (changed, computed[1]))
        return result

    return update


def count_nonzero_on_read(values: Values, torch: Any) -> None:
    """`nonzero`, which indexing by masks calls inside, forward and backward, reads the true count."""
    operator = torch.ops.aten.nonzero.default
    go_on = below(torch)

    def nonzero(tensor: Any) -> Any:
        if not tensor.is_cuda:
            return go_on(operator, tensor)
        computed = values.compute(operator, (tensor,), {})
        values.decide(tensor, computed)
        with values.expecting(0 if computed is None else computed[0].shape[0]):
            result = go_on(operator, tensor)
        values.learn(result, computed)
        return result

    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", nonzero, "BackendSelect")
    values.library_of_operators = library  # type: ignore[attr-defined]
