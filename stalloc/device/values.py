"""What is known of the small tensors on the virtual GPU: of integers and booleans, and of few floating-point numbers.

Contract: what is known of a tensor is kept beside its storage, goes with it, and is the host's result of the functions
that wrote it. What is not known counts as zero, as everything that a kernel would have computed does, and so does what
follows from it: a decision on it is counted, with the line that took it. Changes in place that are not followed are
seen by the version that PyTorch counts. A read of floating-point numbers gives only those that are certain; others
that followed functions made serve to compare.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

from stalloc.device.deciding_lines import Decisions

MAX_ELEMENTS = 1 << 17  # larger ones are data: nobody decides by reading them, and the host would be slow
MAX_NUMBERS = 1024  # of floating-point tensors: scales, boxes, shares
LONGEST_NUMBER = 16  # bytes; copies so short come and go at one address, and a stale one would pass for a result
_PLACES = ("device", "pin_memory")  # arguments that say where a result goes


class _Known:
    """The host's copy of what a storage on the GPU holds."""

    # no dataclass: what is generated is of no file, and torch.compile leaves files out (leave_uncompiled)
    def __init__(self, keeper: Any, elements: Any, version: int | None, certain: bool) -> None:
        self.keeper = keeper  # a weak reference to the storage: while it is here, no other has its address
        self.elements = elements  # a flat tensor of the host
        self.version, self.certain = version, certain
        self.made = False  # by a followed function, be it of what is not certain


class Values:
    """What is known of small tensors; one a process."""

    def __init__(self, torch: Any, library: ctypes.CDLL) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.torch, self._library, self._keep = torch, library, StorageWeakRef
        self.kinds = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
        self.plain = (torch.Tensor, torch.nn.Parameter)
        self.base = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  #: the latter before torch 2.2
        #: a block in which no dispatch mode of the program sees what is done on the host
        self.unseen = getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)
        self.knows_numbers = False  #: whether a floating-point tensor was ever known for certain
        self.keeps_numbers = False  #: whether the value of one was ever kept
        self._new, self._clone, self._copy = torch.zeros, torch.Tensor.clone, torch.Tensor.copy_  # not yet followed
        self._is_finite = torch.isfinite
        self._known: dict[int, _Known] = {}
        self._sweep_at = 1024
        self.decisions = Decisions((os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))))

    def is_followed(self, value: Any) -> bool:
        """Whether a value is a small tensor of integers or booleans on the GPU."""
        return isinstance(value, self.torch.Tensor) and value.is_cuda and value.dtype in self.kinds

    def is_small(self, value: Any) -> bool:
        """Whether a value is a tensor on the GPU that the host can afford to look at."""
        return isinstance(value, self.torch.Tensor) and value.is_cuda and value.numel() <= MAX_ELEMENTS

    def can_keep(self, tensor: Any) -> bool:
        """Whether a tensor is one that may become known: it is on the GPU, and small for its kind."""
        if not isinstance(tensor, self.torch.Tensor) or not tensor.is_cuda:
            return False
        if tensor.dtype in self.kinds:
            return tensor.numel() <= MAX_ELEMENTS
        return tensor.numel() <= MAX_NUMBERS and tensor.is_floating_point() and not tensor.requires_grad

    def knows(self, value: Any) -> bool:
        """Whether a value is a floating-point tensor whose numbers are known for certain, or begins with one."""
        return self.knows_numbers and (found := self._current(value)) is not None and found.certain

    def keeps(self, value: Any) -> bool:
        """Whether a value is a small floating-point tensor that a followed function made, or begins with one."""
        return self.keeps_numbers and (found := self._current(value)) is not None and (found.certain or found.made)

    def is_known(self, tensor: Any) -> bool:
        """Whether something is known, or can be, of a tensor on the GPU that is about to be written."""
        return (self.is_followed(tensor) or self.knows(tensor)) and self.is_small(tensor) and bool(self.known(tensor))

    def same_version(self, tensor: Any) -> None:
        """What was known of a tensor holds still, though PyTorch counts that it was written."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is not None:
            found.version = self._version(tensor)

    def _current(self, value: Any) -> _Known | None:
        """What is kept of few numbers, or of the first of several tensors, if nothing changed them since."""
        value = value[0] if type(value) in (list, tuple) and value else value
        if type(value) not in self.plain or value.numel() > MAX_NUMBERS:
            return None
        try:
            found = self._known.get(value.untyped_storage()._cdata)
            return found if found is not None and found.version == self._version(value) else None
        except Exception:
            return None  # a tensor of another making may have no memory

    def is_of_kept(self, args: tuple[Any, ...]) -> bool:
        """Whether the floating-point tensors among these arguments are small, and one of them is kept."""
        parts = (one for value in args for one in (value if isinstance(value, (list, tuple)) else (value,)))
        numbers = [one for one in parts if isinstance(one, self.torch.Tensor) and one.is_cuda]
        numbers = [one for one in numbers if one.dtype not in self.kinds]
        return all(one.numel() <= MAX_NUMBERS for one in numbers) and any(map(self.keeps, numbers))

    def known(self, tensor: Any) -> _Known | None:
        """What is known of a tensor's storage, None if it is too large; zeros, not certain, where nothing is."""
        if type(tensor) not in self.plain:
            return None  # a tensor of another making may have no memory
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        if found is None:
            num_bytes = storage.nbytes()
            if num_bytes == 0 or num_bytes > 8 * MAX_ELEMENTS:
                return None
            elements = self._zeros(num_bytes // tensor.element_size(), tensor.dtype)
            addresses = [ctypes.c_void_p(one.data_ptr()) for one in (storage, elements)]
            copied = num_bytes > LONGEST_NUMBER and self._library.stalloc_virtual_copied(
                addresses[0], ctypes.c_size_t(num_bytes), addresses[1]
            )
            found = self._keep_known(tensor, elements, certain=bool(copied))
        elif found.version != self._version(tensor):
            found.certain, found.version = False, self._version(tensor)
        return found

    def host(self, tensor: Any, known: _Known) -> Any:
        """The tensor's elements on the host: a view of what is known of its storage."""
        flat = known.elements if known.elements.dtype == tensor.dtype else known.elements.view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _zeros(self, num: int, dtype: Any) -> Any:
        with self.unseen():
            return self._new(num, dtype=dtype, device="cpu")

    def _version(self, tensor: Any) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def _keep_known(self, tensor: Any, elements: Any, *, certain: bool) -> _Known:
        storage = tensor.untyped_storage()
        if len(self._known) >= self._sweep_at:
            self._known = {key: one for key, one in self._known.items() if not one.keeper.expired()}
            self._sweep_at = max(1024, 2 * len(self._known))
        kept = _Known(self._keep(storage), elements, self._version(tensor), certain)
        self._known[storage._cdata] = kept
        return kept

    def on_host(self, value: Any, used: list[_Known]) -> Any:
        """An argument as the host's function takes it. Raises LookupError if it is not known here."""
        if isinstance(value, self.torch.Tensor):
            if not value.is_cuda:
                return value
            if value.numel() > MAX_ELEMENTS:
                raise LookupError
            known = self.known(value)
            if known is None and value.is_floating_point() and type(value) in self.plain:
                used.append(_Known(None, None, None, certain=False))  # a part of large data
                return self._zeros(1, value.dtype).expand(value.shape)
            if known is None:
                raise LookupError
            used.append(known)
            return self.host(value, known)
        if isinstance(value, (list, tuple)):
            return type(value)(self.on_host(one, used) for one in value)
        return value

    def compute(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, makes: bool = False
    ) -> tuple[Any, bool] | None:
        """The function's result on the host, and whether it is certain; None where the arguments are not known."""
        used: list[_Known] = []
        try:
            with self.unseen():
                here = [self.on_host(value, used) for value in args]
                named = {name: self.on_host(value, used) for name, value in kwargs.items() if name not in _PLACES}
            if "device" in kwargs or makes:  # whatever the default device is, this is no request of the program
                named["device"] = "cpu"
            with self.torch.no_grad(), self.unseen():
                return function(*here, **named), all(one.certain for one in used)
        except Exception:
            return None  # whatever the host cannot do is not known, and the program need not hear of it

    def learn(self, result: Any, computed: tuple[Any, bool] | None) -> None:
        """Keep what the host computed as what the result on the GPU holds."""
        if computed is None:
            return
        host, certain = computed
        if isinstance(result, (list, tuple)):
            for one, known in zip(result, host, strict=False):
                self.learn(one, (known, certain))
        elif type(result) in self.plain and self.can_keep(result) and result.shape == host.shape:
            if result.dtype not in self.kinds:
                with self.unseen():
                    if not certain and not self._is_finite(host).all():  # zeros where data would be may divide
                        self._known.pop(result.untyped_storage()._cdata, None)
                        return
                self.keeps_numbers = True
            there = self._known.get(result.untyped_storage()._cdata)
            if there is not None:  # changed in place on the host too, or a view
                there.certain, there.version, there.made = there.certain and certain, self._version(result), True
            elif 0 < result.untyped_storage().nbytes() <= 8 * MAX_ELEMENTS:
                num = result.untyped_storage().nbytes() // result.element_size()
                self.knows_numbers = self.knows_numbers or (certain and result.dtype not in self.kinds)
                kept = self._keep_known(result, self._zeros(num, result.dtype), certain=certain)
                kept.made = True
                with self.unseen():
                    self._copy(self.host(result, kept), host)

    def learn_drawn(self, result: Any, host: Any) -> None:
        """Keep numbers that might have been drawn, which serve to compare and to choose by; none is certain."""
        if host is not None and host.shape == result.shape and self._covers(result):
            self._keep_known(result, host.reshape(-1), certain=False)

    def _covers(self, tensor: Any) -> bool:
        """Whether a tensor has each element of its storage once."""
        return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

    def learn_copy(self, tensor: Any, source: Any) -> bool:
        """Keep what was copied to a tensor from one of the host like it, the usual way to the GPU: whether it is so."""
        if source.is_cuda or source.dtype != tensor.dtype or source.shape != tensor.shape or source.requires_grad:
            return False
        if type(source) not in self.plain or not source.is_contiguous() or not self._covers(tensor):
            return False
        found = self._known.get(tensor.untyped_storage()._cdata)
        with self.unseen():
            if found is not None and found.elements.dtype == source.dtype:
                self._copy(found.elements, source.reshape(-1))
                found.certain, found.version = True, self._version(tensor)
            else:
                self.knows_numbers = self.knows_numbers or tensor.dtype not in self.kinds
                self.keeps_numbers = self.keeps_numbers or self.knows_numbers
                self._keep_known(tensor, self._clone(source).reshape(-1), certain=True)
        return True

    def learn_filled(self, data: Any) -> None:
        """Keep what a file put into a storage, given as its bytes, instead of what was known of it."""
        self._known.pop(data.untyped_storage()._cdata, None)
        num_bytes = data.untyped_storage().nbytes()
        if not 0 < num_bytes <= LONGEST_NUMBER:
            return  # `known` finds longer ones in memory
        elements = self._zeros(num_bytes, data.dtype)
        addresses = [ctypes.c_void_p(one.data_ptr()) for one in (data.untyped_storage(), elements)]
        if self._library.stalloc_virtual_copied(addresses[0], ctypes.c_size_t(num_bytes), addresses[1]):
            self._keep_known(data, elements, certain=True)
            self.knows_numbers = self.keeps_numbers = True

    def stored(self, storage: Any) -> Any:
        """The host's storage with what one on the GPU holds, None where zeros or what was copied there will do.

        Whether floating-point numbers changed since cannot be seen without their tensor: only single ones are given.
        """
        found = self._known.get(storage._cdata)
        if found is None:
            return None
        is_number = found.certain and storage.nbytes() <= LONGEST_NUMBER
        return found.elements.untyped_storage() if is_number or found.elements.dtype in self.kinds else None

    def overwrite(self, tensor: Any) -> None:
        """All of a tensor is about to be written: if that is its whole storage, nothing there is doubtful any more."""
        found = self.known(tensor)
        if found is not None and self._covers(tensor):
            found.certain = True

    def read(self, tensor: Any) -> Any:
        """The host's copy of a tensor that the program reads, None if there is none; a doubtful one is counted."""
        try:
            known = self.known(tensor)
        except Exception:
            return None
        if known is None or not known.certain:
            assumed = self.decisions.take()
            if assumed is not None:
                return self._filled(tensor, assumed)
        with contextlib.suppress(Exception), self.unseen():
            return None if known is None else self.host(tensor, known)
        return None

    def read_data(self, tensor: Any) -> Any:
        """What is read of floating-point numbers: what is known of them, None for what is in memory.

        A single number that is not known is zero: what was copied to its address for another one may still be there.
        """
        if self.knows(tensor):
            with self.unseen():
                return self.host(tensor, self._known[tensor.untyped_storage()._cdata])
        if type(tensor) not in self.plain or tensor.numel() * tensor.element_size() > LONGEST_NUMBER:
            return None
        return self._filled(tensor, self.decisions.take_number() or 0.0)

    def _filled(self, tensor: Any, value: float) -> Any:
        with self.unseen():
            return self._zeros(tensor.numel(), tensor.dtype).fill_(value).reshape(tensor.shape)

    def decide(self, tensor: Any, computed: tuple[Any, bool] | None) -> None:
        """Count a size, or an answer, that follows from what a tensor holds, where that is not certain."""
        if type(tensor) in self.plain and (computed is None or not computed[1]):
            self.decisions.take()

    @contextlib.contextmanager
    def expecting(self, num: int) -> Iterator[None]:
        """A block in which the next count that is read from the GPU is `num`."""
        self._library.stalloc_virtual_expect(ctypes.c_int64(num))
        try:
            yield
        finally:
            self._library.stalloc_virtual_expect(ctypes.c_int64(-1))
