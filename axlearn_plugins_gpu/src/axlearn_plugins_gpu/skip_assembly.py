"""Compile programs for GPUs without machine code, for plans. Does not import JAX.

Code generation starts after XLA has fused and scheduled a program and has assigned its buffers. It does not change what a plan
reads, but it took most of the time: 104 of 154 s for Qwen3-Next 80B-A3B on 256 H100.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ASSEMBLER = """#!/bin/sh
case "$*" in *--version*) echo 'Cuda compilation tools, release 12.9, V12.9.86'; exit 0;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf '\\177ELF' > "$2"; fi
    shift
done
"""
"""Takes the place of `ptxas`, and writes an empty kernel. XLA asks for the version first."""


@contextlib.contextmanager
def skip_assembly() -> Iterator[Mapping[str, Any]]:
    """Yield XLA options that replace the assembler and turn off the optimizations of LLVM.

    A program that is compiled with them cannot run. If XLA does not use an external assembler, it assembles the kernels.
    """
    with tempfile.TemporaryDirectory(prefix="axlearn-assembler-") as directory:
        assembler = Path(directory) / "bin" / "ptxas"
        assembler.parent.mkdir()
        assembler.write_text(_ASSEMBLER)
        assembler.chmod(0o755)
        yield {
            "xla_gpu_cuda_data_dir": directory,
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        }
