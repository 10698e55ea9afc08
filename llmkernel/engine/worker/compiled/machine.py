"""This processor as LLVM knows it."""

import ctypes
import functools
from pathlib import Path

from llvmlite import binding

__all__ = ["has_feature", "multiplies_pairs", "page_out", "processor", "target_machine"]

_MADV_PAGEOUT = 21


@functools.cache
def processor() -> tuple[str, str]:
    """Its name, and its features as LLVM writes them: code for another one would not run, or not as fast."""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def has_feature(name: str) -> bool:
    """Whether it has these instructions, by LLVM's name of them."""
    return f"+{name}" in processor()[1].split(",")


def multiplies_pairs() -> bool:
    """It multiplies pairs of bfloat16 in one instruction; elsewhere inputs are widened to float32."""
    return has_feature("avx512bf16")


def target_machine() -> binding.TargetMachine:
    """What emits and loads code for it: a new one for each use, an execution engine takes the one that it is given."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = processor()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=3, codemodel="jitdefault", jit=True)


def page_out() -> None:
    """Let the system take back what LLVM's own code occupies (58 MB on Linux, nothing elsewhere): it has done its work,
    and what is needed again comes back from the file."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # not Linux
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in lines:
        if "libllvmlite" in line:
            span, access = line.split()[:2]
            first, last = (int(end, 16) for end in span.split("-"))
            if "w" not in access:
                madvise(first, last - first, _MADV_PAGEOUT)  # a request: where it is not known nothing happens
