"""Declarations of the arguments that launches pass to kernels, once for each kernel: the host packs by it, and the
compiler is held to it.

CUDA copies as many bytes from a launch as the kernel's own parameters have, whatever the host passed. So a source is
compiled together with static assertions on everything that is declared here: sizes of structures, offsets and types of
their fields, number and types of a kernel's parameters, and the constants by which the host counts. What differs does
not compile, for any architecture and on a machine without a GPU. Nothing here knows what a kernel computes.
"""

import operator
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rotquant.foundation.errors import KernelError


@dataclass(frozen=True, eq=False)
class Scalar:
    """A number, a pointer or opaque bytes: a field of a structure, or a parameter of a kernel.

    cpp: its type in C++; all pointers are void*. dtype: numpy's. read: what a launch gives as a plain Python value.
    """

    cpp: str
    dtype: np.dtype
    read: Callable[[Any], Any]

    def pack(self, value: Any) -> np.generic:
        """A numpy scalar of exactly this type."""
        return self.dtype.type(self.read(value))


#: What C++ calls the floating-point types that kernels read: those of 16 bits, and all.
TYPES_16 = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
TYPES = TYPES_16 | {torch.float32: "float"}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


#: A tensor's memory, or null for None.
POINTER = Scalar("void*", np.dtype("u8"), _address)
#: Also truth values, and enumerations.
INT = Scalar("int", np.dtype("i4"), operator.index)
LONG = Scalar("long long", np.dtype("i8"), operator.index)
FLOAT = Scalar("float", np.dtype("f4"), float)
#: What Python's `struct` calls them.
_CODES = {POINTER.dtype: "Q", INT.dtype: "i", LONG.dtype: "q", FLOAT.dtype: "f"}


class Structure:
    """A structure of C++ that goes to kernels by value.

    Args:
        cpp: its name in C++.
        fields: all of them by name and in order. numpy aligns them as C++ does, padding at the end included.
    """

    def __init__(self, cpp: str, **fields: "Scalar | Structure") -> None:
        self.cpp = cpp
        self.fields = fields
        self.dtype = np.dtype([(name, kind.dtype) for name, kind in fields.items()], align=True)
        self._readers = [(name, kind.read, isinstance(kind, Structure)) for name, kind in fields.items()]
        self._bytes = struct.Struct("<" + _format(self.dtype))

    def of(self, **values: Any) -> np.void:
        """The structure with these fields: tensors or None for pointers, mappings for structures inside.

        Raises:
            KernelError: a number is too large for its field.
        """
        try:
            return np.frombuffer(bytearray(self._bytes.pack(*self.read(values))), self.dtype)[0]
        except struct.error as error:
            raise KernelError(f"a tensor is too large for {self.cpp}: {error}.") from None

    def read(self, values: Mapping[str, Any] | list[Any]) -> list[Any]:
        """Return the structure's numbers as plain Python values, in order, those of structures inside among them; such
        a list as it is."""
        if isinstance(values, list):
            return values
        if len(values) != len(self._readers):
            raise TypeError(f"{self.cpp} has the fields {', '.join(self.fields)}, not {', '.join(values)}.")
        numbers: list[Any] = []
        for name, read, several in self._readers:
            if several:
                numbers.extend(read(values[name]))
            else:
                numbers.append(read(values[name]))
        return numbers

    def pack(self, value: np.void) -> np.void:
        """The value itself, if `of` made it."""
        if value.dtype is not self.dtype:
            raise TypeError(f"a launch passes {value.dtype}, and the kernel takes {self.cpp}.")
        return value

    def checks(self) -> Iterator[str]:
        """Static assertions that C++ has these fields, no others, and each where numpy has it."""
        for kind in self.fields.values():
            if isinstance(kind, Structure):
                yield from kind.checks()
        size = self.dtype.itemsize
        yield _assertion(f"sizeof({self.cpp}) == {size}", f"the host's {self.cpp} has {size} bytes")
        for name, kind in self.fields.items():
            at = cast("Mapping[str, Any]", self.dtype.fields)[name][1]
            place = f"HOST_OFFSET({self.cpp}, {name}) == {at}"
            yield _assertion(place, f"the host's {self.cpp} has {name} at byte {at}")
            same = f"host::same<host::Passed<decltype({self.cpp}::{name})>, {kind.cpp}>"
            yield _assertion(same, f"the host's {self.cpp}::{name} is {kind.cpp}")
        # A structured binding names all fields or does not compile: one that the host lacks may hide in padding.
        yield (
            f"[[maybe_unused]] static inline void host_fields(const {self.cpp}& all) "
            f"{{ [[maybe_unused]] const auto& [{', '.join(self.fields)}] = all; }}"
        )


def _format(dtype: np.dtype) -> str:
    """A structured type for Python's `struct`, which packs twice as fast as numpy: every gap is padding."""
    parts, end = [], 0
    for kind, offset, *_ in cast("Mapping[str, Any]", dtype.fields).values():
        parts.append(f"{offset - end}x" + (_format(kind) if kind.fields else _CODES.get(kind, f"{kind.itemsize}s")))
        end = offset + kind.itemsize
    return "".join((*parts, f"{dtype.itemsize - end}x"))


class Parameters:
    """The parameters of a kernel, by name and in order."""

    def __init__(self, **kinds: Scalar | Structure) -> None:
        self.kinds = kinds
        self._packers = [kind.pack for kind in kinds.values()]

    def pack(self, values: tuple[Any, ...]) -> tuple[np.generic, ...]:
        """Pack arguments into the bytes that CUDA copies for each parameter.

        Raises:
            KernelError: a number is too large for its parameter.
        """
        try:
            return tuple([pack(value) for pack, value in zip(self._packers, values, strict=True)])
        except OverflowError as error:
            raise KernelError(f"a tensor is too large for a kernel: {error}.") from None

    def checks(self, instance: str) -> Iterator[str]:
        """Static assertions that a kernel takes just these."""
        for kind in self.kinds.values():
            if isinstance(kind, Structure):
                yield from kind.checks()
        types = ", ".join(kind.cpp for kind in self.kinds.values())
        same = f"host::same<host::Parameters<decltype(&{instance})>, void({types})>"
        yield _assertion(same, f"a launch passes {types} to {instance}")


@dataclass(frozen=True, eq=False)
class CudaFile:
    """A file of CUDA sources, as launches know it.

    name: under kernels/, such as "gemv.cu".
    kernels: what launches pass to each of its kernels, by the kernel's name without template arguments.
    constants: constant expressions of C++ and their values on the host, which computes grids, shared memory and the
        order of tensors from them.
    """

    name: str
    kernels: Mapping[str, Parameters] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)

    def parameters(self, kernel: str) -> Parameters:
        """Parameters of an instance of a kernel.

        Raises:
            KernelError: the file declares no such kernel.
        """
        name = kernel.partition("<")[0]
        if name not in self.kernels:
            raise KernelError(f"what the kernel {name} of kernels/{self.name} takes is not declared.")
        return self.kernels[name]

    def checks(self, instances: tuple[str, ...], constants: tuple[tuple[str, int], ...] = ()) -> str:
        """C++ that compiles after the source if these instances, or all kernels if none are named, are as declared."""
        kernels = instances or tuple(self.kernels)
        lines = [check for kernel in kernels for check in self.parameters(kernel).checks(kernel)]
        for expression, value in (*self.constants.items(), *constants):
            lines.append(_assertion(f"({expression}) == {value}", f"the host counts on {expression} being {value}"))
        return "\n".join((PRELUDE, *dict.fromkeys(lines), ""))


#: What checks are written with: parameters of a function as a launch passes them, any pointer as void*.
PRELUDE = """
// What launches pass, as rotquant/kernels/arguments.py has it.
#define HOST_OFFSET(type, field) __INTADDR__(&((type*)0)->field)  // offsetof, which NVRTC has not
namespace host {
template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class T>
struct PassedAs {
    using Type = T;
};
template <class T>
struct PassedAs<T*> {
    using Type = void*;
};
template <class T>
using Passed = typename PassedAs<T>::Type;

template <class Kernel>
struct ParametersOf;
template <class R, class... T>
struct ParametersOf<R (*)(T...)> {
    using Type = Passed<R>(Passed<T>...);
};
template <class Kernel>
using Parameters = typename ParametersOf<Kernel>::Type;
}  // namespace host
"""


def _assertion(condition: str, message: str) -> str:
    return f'static_assert({condition}, "{message}");'
