"""This processor as LLVM knows it."""

import functools

from llvmlite import binding

__all__ = ["processor", "target_machine"]


@functools.cache
def processor() -> tuple[str, str]:
    """Its name, and its features as LLVM writes them: code for another one would not run, or not as fast."""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def target_machine() -> binding.TargetMachine:
    """What emits and loads code for it: a new one for each use, an execution engine takes the one that it is given."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = processor()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=3, codemodel="jitdefault", jit=True)
