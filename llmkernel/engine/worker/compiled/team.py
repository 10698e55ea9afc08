"""Team: kernels on the threads that torch's own operations run on.

Torch's OpenMP library is asked to run a kernel as it runs torch's loops: a second pool of threads beside it would cost
more than it brings (cpu.md section 6). Where it has no such door (macOS, Windows), kernels run in the calling thread.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmkernel.engine.worker.compiled.arguments import Arguments

__all__ = ["Kernel", "Scratch", "Team"]


class Kernel:
    """A compiled `void kernel(Arguments *)`. short: runs it here and keeps the GIL; long: without the GIL."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.short = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self.long = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


class Team:
    """Runs kernels, alone or on all of torch's threads."""

    def __init__(self) -> None:
        self._runtime = _runtime()

    @property
    def thread_number(self) -> int:
        """Address of the function that numbers the threads of a team; 0 where there are none."""
        return 0 if self._runtime is None else self._runtime.thread_number

    @property
    def meet(self) -> int:
        """Address of the function in which the threads of a team wait for each other; 0: there is none."""
        return 0 if self._runtime is None else self._runtime.meet

    @property
    def threads(self) -> int:
        """The most that `run` takes now, and gets: kernels deal out their work by it."""
        return 1 if self._runtime is None else min(torch.get_num_threads(), self._runtime.limit)

    def run(self, kernel: Kernel, arguments: Arguments, *, parts: int, is_short: bool = False) -> None:
        """In as many threads as torch uses now, at most `parts`, without the GIL; what is short here, at once."""
        if is_short:
            kernel.short(arguments.address)
            return
        threads = min(parts, self.threads)
        if self._runtime is None or threads <= 1:
            kernel.long(arguments.address)
            return
        arguments.team, arguments.thread_number = threads, self._runtime.thread_number
        self._runtime.fork(kernel.address, arguments.address, threads, 0)
        arguments.team = 1


class Scratch:
    """Memory for the threads of a team to write to, grown when it must."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def address(self, size: int) -> int:
        """Of `size` numbers of float32 for each of torch's threads; good until it is asked for more."""
        wanted = size * torch.get_num_threads()
        if len(self._memory) < wanted:
            self._memory = torch.empty(wanted, dtype=torch.float32, device="cpu")
        return self._memory.data_ptr()


class _OpenMP(NamedTuple):
    """fork: GOMP_parallel(function, data, threads, flags). thread_number, meet: addresses of omp_get_thread_num and
    GOMP_barrier. limit: the most threads of a team."""

    fork: Any
    thread_number: int
    meet: int
    limit: int


@functools.cache
def _runtime() -> _OpenMP | None:
    """The OpenMP library that torch has loaded, if it opens to others.

    Told to give the threads that it is asked for: by OMP_DYNAMIC it may give fewer, and their work would be left out.
    That is a setting of the calling thread, the one that steps.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = {Path(line[line.index("/") :]) for line in lines if "/" in line}
    libraries = [path for path in sorted(mapped) if "omp" in path.name and ".so" in path.name]
    beside_torch = Path(torch.__file__).parent
    for path in sorted(libraries, key=lambda path: beside_torch not in path.parents):
        library = ctypes.CDLL(str(path))
        if all(hasattr(library, name) for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num")):
            fork = library.GOMP_parallel
            fork.argtypes, fork.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            library.omp_set_dynamic(0)
            number, meet = _address(library.omp_get_thread_num), _address(library.GOMP_barrier)
            return _OpenMP(fork, number, meet, library.omp_get_thread_limit())
    return None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
