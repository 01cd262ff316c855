"""Compiles a Triton kernel for cards that are not there.

compiled = compile_for("gfx950", kernel, {"x_ptr": "*bf16", "count": "i64"}, {"TILE": 1024})
compiled.asm["amdgcn"]
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}


def compile_for(target: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """The compiled kernel; `asm` holds "ptx" or "amdgcn". Pointers and sizes are taken to be multiples of 16."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name] != "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": 4, **options})


def assembly(compiled: Any) -> str:
    return compiled.asm.get("ptx") or compiled.asm["amdgcn"]
