"""build: kernels as an object file for this processor. Imports numba: 0.3 s."""

from collections.abc import Mapping
from typing import Any

from llvmlite import binding

from llmkernel.engine.worker.compiled.attention_kernel import attention_kernel
from llmkernel.engine.worker.compiled.library import Recipe
from llmkernel.engine.worker.compiled.machine import target_machine
from llmkernel.engine.worker.compiled.product_kernels import product_kernel
from llmkernel.engine.worker.compiled.row_kernels import gate_kernel, norm_kernel
from llmkernel.engine.worker.compiled.sequence_kernel import sequence_kernel
from llmkernel.engine.worker.compiled.words import BFLOAT16, FLOAT32

__all__ = ["build"]

_ELEMENTS = {"bfloat16": BFLOAT16, "float32": FLOAT32}


def build(recipe: Recipe) -> bytes:
    """An object file with `void NAME(Arguments *)` for each kernel of the recipe; it takes 1 to 3 seconds."""
    if recipe[0] == "product":
        return _link({"product": product_kernel(recipe[1])})
    kind, head_size = _ELEMENTS[recipe[1]], int(recipe[2])
    kernels = {"norm": norm_kernel(kind), "gate": gate_kernel(kind), "attention": attention_kernel(kind, head_size)}
    return _link(kernels | {"sequence": sequence_kernel()})


def _link(kernels: Mapping[str, Any]) -> bytes:
    """Each of numba's functions behind a door that C can call, and nothing else: no references to Python are left."""
    machine = target_machine()
    whole = binding.parse_assembly("")
    whole.triple = machine.triple
    for name, kernel in kernels.items():
        (compiled,) = kernel.overloads.values()
        native = compiled.fndesc.llvm_func_name
        part = binding.parse_assembly(compiled.library.get_llvm_str())
        part.link_in(binding.parse_assembly(_DOOR.format(name=name, native=native)))
        for function in part.functions:
            if not function.is_declaration and function.name != name:
                function.linkage = "internal"
        whole.link_in(part)
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(whole, passes)
    return bytes(machine.emit_object(whole))


_DOOR = """
declare i32 @"{native}"(ptr, ptr, i64)

define void @{name}(ptr %arguments) {{
    %nothing = alloca i64
    %error = alloca ptr
    %address = ptrtoint ptr %arguments to i64
    %status = call i32 @"{native}"(ptr %nothing, ptr %error, i64 %address)
    ret void
}}
"""
"""numba's functions take where to put a result and an error; kernels have neither."""
