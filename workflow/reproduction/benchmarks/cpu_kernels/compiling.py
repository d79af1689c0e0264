"""kernels/cpu/decoding.cpp made into functions by the machine's C++ compiler when first used, for its processor.

The library lies in the user's cache under a digest of everything that went into it (sources, flags, compiler, what the
compiler knows of the processor), and is put there whole. Nothing here knows what the functions compute.
"""

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from rotquant.foundation.errors import KernelError
from rotquant.foundation.files import atomic_path, cache_folder, canonical_json, short_hash
from rotquant.kernels.launch.loading import SOURCES

SOURCE = SOURCES / "cpu/decoding.cpp"

#: Instructions of the processor at hand.
NATIVE = ("-march=native",)

#: No errno and no traps: rounding and square roots become single instructions. Sums are never reordered without
#: notice, so floats are those that the source says.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC")

_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

#: Functions by name: what each returns and takes.
_SIGNATURES = {
    "instructions": (ctypes.c_char_p, ()),
    "quantize": (None, (_POINTER, _INT, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER)),
    "product": (None, (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER)),
    "linear": (None, (_POINTER, _INT, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER)),
    "hadamard": (None, (_POINTER, _INT, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER)),
    "attention": (None, (_POINTER, _INT, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER)),
    "linear16": (None, (_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER)),
    "read": (ctypes.c_uint64, (_POINTER, _SIZE)),
}


class Functions:
    """The functions of decoding.cpp as attributes; see there for what each takes."""

    instructions: Callable[..., bytes]
    quantize: Callable[..., None]
    product: Callable[..., None]
    linear: Callable[..., None]
    hadamard: Callable[..., None]
    attention: Callable[..., None]
    linear16: Callable[..., None]
    read: Callable[..., int]

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"rotquant_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


@functools.cache
def functions(target: tuple[str, ...] = NATIVE) -> Functions:
    """The functions, compiled for `target`: flags that name the processor's instructions.

    Raises:
        KernelError: there is no C++ compiler, or it refuses.
    """
    return Functions(compile_source(target))


def compile_source(target: tuple[str, ...] = NATIVE, folder: Path | None = None) -> Path:
    """Compile, or take an earlier result: the path of a shared library.

    Two processes at the same time both compile, and the last one's equal result stays.

    Args:
        folder: where libraries are saved; by default `kernels` in the cache (`foundation.files.cache_folder`).

    Raises:
        KernelError: there is no C++ compiler, or it refuses; its messages follow the first sentence then.
    """
    compiler = _compiler()
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    flags = [*_FLAGS, *target]
    macros = _run([compiler, *target, "-dM", "-E", "-x", "c++", os.devnull])  # compiler and processor, in its own words
    key = short_hash(canonical_json([texts, [*_FLAGS, *target], macros]))
    path = (folder or cache_folder("kernels")) / f"{SOURCE.stem}-{key}.so"
    if not path.exists():
        with atomic_path(path) as temporary:
            _run([compiler, *flags, str(SOURCE), "-o", str(temporary), *_openmp()])
    return path


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    found = [shutil.which(name) for name in ([chosen] if chosen else ["c++", "g++", "clang++"])]
    if not any(found):
        names = chosen or "c++, g++ or clang++"
        raise KernelError(f"the CPU kernels need a C++ compiler, and there is no {names} on this machine.")
    return next(path for path in found if path)


def _openmp() -> list[str]:
    """Link with the OpenMP that torch brought: threads of a second one would wait for work on the same cores."""
    brought = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    return ["-Wl,--as-needed", *map(str, brought[:1])]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{Path(command[0]).name} does not compile {SOURCE.name}:\n{done.stderr.strip()}")
    return done.stdout
