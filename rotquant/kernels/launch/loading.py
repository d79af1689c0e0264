"""Compile kernels/*.cu to functions on a GPU: NVRTC to machine code on any machine, CuPy's RawModule on one with a GPU.

Compiled code is saved in a folder of the user's cache under a digest of everything that went into it (sources, included
headers, checks of arguments, options, compiler), so an edit of a header is never missed. Nothing here knows what a
kernel computes.
"""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotquant.foundation.errors import KernelError
from rotquant.foundation.files import atomic_path, cache_folder, canonical_json, read_json, short_hash, write_json
from rotquant.kernels.arguments import CudaFile, Parameters

#: The CUDA sources: in a checkout a link to its folder kernels/, in a wheel files of the package.
SOURCES = (Path(__file__).parents[1] / "sources").resolve()

#: Architectures that every kernel is compiled for in the tests: A100, RTX 30, RTX 40 / L40S, H100 and H200.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a")

#: Counts changes to what this module makes of the compiler's output.
_FORMAT = 2

#: CuPy adds -ftz=true to what it compiles; here nothing is added without notice.
_OPTIONS = ("--std=c++17", "--extra-device-vectorization", "-default-device")


@dataclass(frozen=True)
class TranslationUnit:
    """One translation unit.

    file: with what launches pass to its kernels.
    instances: C++ expressions of the kernels to instantiate, such as "hadamard<__half, 4096>"; also their names in
        `kernel`. Kernels declared extern "C" are named as they are and need no mention.
    constants: as in `CudaFile`, of these instances only: C++ expressions and their values.
    """

    file: CudaFile
    instances: tuple[str, ...] = ()
    constants: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel on a GPU: CuPy's function, and what launches pass to it."""

    function: Any
    parameters: Parameters


@dataclass(frozen=True)
class Compiled:
    """Machine code of a source for one architecture: a file, and the symbol of each of the source's instances."""

    cubin: Path
    symbols: dict[str, str]


def architecture_of_device(device: torch.device) -> str:
    """The architecture to compile for on this GPU: "sm_90a" on Hopper, else "sm_<major><minor>".

    Raises:
        KernelError: the GPU is older than sm_80.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise KernelError(f"the CUDA kernels need compute capability 8.0 or newer, and {name} has {major}.{minor}.")
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def kernel(source: TranslationUnit, name: str, device: torch.device) -> Kernel:
    """The kernel `name` (an instance of `source` or an extern "C" function) on a GPU; made once per process.

    Raises:
        KernelError: CuPy or NVRTC is missing, the GPU is too old, or the source does not compile, which it does not
            either where its kernels take something else than declared.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _kernel(source, name, index)


@functools.lru_cache(maxsize=4096)
def _kernel(source: TranslationUnit, name: str, index: int) -> Kernel:
    module, symbols = _module(source, index)
    with _cupy().cuda.Device(index):
        return Kernel(module.get_function(symbols.get(name, name)), source.file.parameters(name))


@functools.lru_cache(maxsize=1024)
def _module(source: TranslationUnit, index: int) -> tuple[Any, dict[str, str]]:
    compiled = compile_source(source, architecture_of_device(torch.device("cuda", index)))
    cupy = _cupy()
    with cupy.cuda.Device(index):
        module = cupy.RawModule(path=str(compiled.cubin))
        _keep(module.module)
    return module, compiled.symbols


def _keep(module: Any) -> None:
    """Never destroy a module: CUDA unloads it with its context.

    After a fault on the GPU a destructor fails, and those that run at the interpreter's exit would bury the message of
    the fault under one for each module.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def compile_source(source: TranslationUnit, architecture: str, folder: Path | None = None) -> Compiled:
    """Compile with NVRTC, or take an earlier result; needs no GPU and no driver.

    The compiler also reads what launches pass (`CudaFile.checks`), and refuses kernels that take something else.

    Args:
        folder: where compiled code is saved; by default `kernels` in the cache (`foundation.files.cache_folder`).

    Raises:
        KernelError: NVRTC is missing, or the compiler refuses; its messages follow the first sentence then.
    """
    nvrtc = _nvrtc()
    folder = folder or cache_folder("kernels")
    text = _source_text(source.file.name) + source.file.checks(source.instances, source.constants)
    include = SOURCES / "include"
    headers = {path.relative_to(include).as_posix(): path.read_text() for path in sorted(include.rglob("*.cuh"))}
    options = (*_OPTIONS, f"-arch={architecture}")
    version = ".".join(map(str, nvrtc.getVersion()))
    key = short_hash(canonical_json([_FORMAT, text, headers, list(source.instances), list(options), version]))
    stem = f"{Path(source.file.name).stem}-{architecture}-{key}"
    cubin, symbols = folder / f"{stem}.cubin", folder / f"{stem}.json"
    if not (cubin.exists() and symbols.exists()):
        code, names = _compile(nvrtc, source, text, (*options, *_include_options()))
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(cubin) as temporary:
            temporary.write_bytes(code)
        write_json(symbols, names)  # last: its presence says that both are whole
    return Compiled(cubin, read_json(symbols))


def _compile(nvrtc: Any, source: TranslationUnit, text: str, options: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
    program = nvrtc.createProgram(text, source.file.name, (), ())
    try:
        for instance in source.instances:
            nvrtc.addNameExpression(program, instance)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            raise KernelError(f"kernels/{source.file.name} does not compile:\n{nvrtc.getProgramLog(program)}") from None
        names = {instance: nvrtc.getLoweredName(program, instance) for instance in source.instances}
        # CuPy takes machine code for a string and cuts its last byte, always the end of padding.
        return nvrtc.getCUBIN(program) + b"\0", names
    finally:
        nvrtc.destroyProgram(program)


def _source_text(file: str) -> str:
    path = SOURCES / file
    if not path.exists():
        raise KernelError(f"{path} is missing: the CUDA kernels are compiled from a checkout of rotquant.")
    return path.read_text()


def _include_options() -> tuple[str, ...]:
    """Our headers, and CUDA's and CCCL's from wherever they are installed (a toolkit or NVIDIA's wheels)."""
    try:
        from cuda import pathfinder

        found = [pathfinder.find_nvidia_header_directory(library) for library in ("cudart", "cccl")]
    except ImportError:
        found = []
    if None in found or not found:
        raise KernelError("CUDA's headers are missing: pip install 'cuda-toolkit[cudart,cccl]', or install a toolkit.")
    return tuple(f"-I{folder}" for folder in (SOURCES / "include", *found))


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # CuPy raises several kinds, by what is missing
        raise KernelError(f"the CUDA kernels need CuPy and NVRTC (pip install cupy-cuda13x): {error}.") from None
    return nvrtc


def _cupy() -> Any:
    """CuPy, which keeps what it compiles itself in our cache, too: it fails where its own cannot be written."""
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache_folder("cupy")))
    try:
        import cupy
    except ImportError as error:
        raise KernelError(f"the CUDA kernels need CuPy (pip install cupy-cuda13x): {error}.") from None
    return cupy
