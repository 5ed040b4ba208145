"""Compile every Triton kernel for GPUs that are not here, and record what it will occupy there.

The operators run on CPU tensors while each launch is intercepted: it is compiled for the target with exactly the
arguments, specialisation and configuration that a launch on that GPU would have, and not executed. Run as
`python -m benchmarks.kernels.aot [--out FILE] [--only NAME]`, in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import configs
from kernels.testing import offsets_of

TARGETS = (80, 90, 100)
FIRST_FP8_TARGET = 89  # GPUs before it have no E4M3 type
RESULT = Path(__file__).parents[1] / "results" / "kernels_aot.csv"
VARIANTS = {"jagged_attention", "seed_pooling", "gdpa_fast_gelu"}  # kernels that --quick compiles otherwise
LENGTHS = [0, 1, 63, 64, 65, 200]
REQUESTS = len(LENGTHS)


@dataclasses.dataclass(frozen=True)
class Record:
    """What one kernel occupies on one target; `stack_bytes` is local memory per thread: spills and arrays."""

    operator: str
    kernel: str
    target: str
    dtype: str
    width: int
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int


def run_both(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Forward and backward, for their launches."""
    leaves = [x.requires_grad_() for x in inputs]
    out = function(*leaves)
    torch.autograd.grad(out, leaves, torch.zeros_like(out))


def jobs(dtype: torch.dtype, width: int) -> dict[str, Callable[[], None]]:
    """One call per operator and variant, by name; the dispatchers are passed by, since they would pick the CPU form."""
    from kernels._jagged import layout_of
    from kernels.block_attention import triton as block
    from kernels.broadcast_linear import triton as linear
    from kernels.gdpa import triton as gdpa
    from kernels.gdpa import triton_pffn as pffn
    from kernels.grouped_gemm import triton as grouped
    from kernels.jagged_attention import triton as jagged
    from kernels.jagged_attention import triton_rotary
    from kernels.quantize import triton as quantize

    total, heads = sum(LENGTHS), 4
    rows = layout_of(offsets_of(LENGTHS), total)

    def packed(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def qkv() -> list[Tensor]:
        return [packed(total, heads, width) for _ in range(3)]

    def generated() -> list[Tensor]:
        return [packed(total, heads, width), *(packed(REQUESTS, 128, heads, width) for _ in range(2))]

    def multiply(x: quantize.Quantized) -> None:
        quantize.scaled_matmul(x, x.T, dtype)

    scale = width**-0.5
    shuffled = torch.tensor([2, 0, 1, 1, 5])
    return {
        "jagged_attention": lambda: run_both(
            lambda q, k, v: jagged.attention(q, k, v, rows, rows, False, None, scale), *qkv()
        ),
        "jagged_attention_causal_window": lambda: run_both(
            lambda q, k, v: jagged.attention(q, k, v, rows, rows, True, 100, scale), *qkv()
        ),
        "rotary": lambda: run_both(
            lambda x: triton_rotary.rotate(x, torch.zeros(total, width // 2)), packed(total, heads, width)
        ),
        "seed_pooling": lambda: run_both(
            lambda q, k, v: jagged.attention_shared(q, k, v, rows, scale), packed(32, heads, width), *qkv()[1:]
        ),
        "block_attention": lambda: run_both(
            lambda q, k, v: block.attention(q, k, v, rows.blocks(64), 64, scale), *qkv()
        ),
        "gdpa": lambda: run_both(lambda q, k, v: gdpa.gdpa(q, k, v, rows, "gelu", 1.0, 1.0, None), *generated()),
        "gdpa_fast_gelu": lambda: run_both(
            lambda q, k, v: gdpa.gdpa(q, k, v, rows, "fast_gelu", 1.0, 1.0, None), *generated()
        ),
        "gdpa_pffn": lambda: run_both(
            lambda q, k, v: pffn.gdpa_pffn(q, k, v, rows, "gelu", 1.0, 1.0, None, 1e-5), *generated()
        ),
        "broadcast_linear": lambda: run_both(
            lambda *x: linear.broadcast_linear(*x, shuffled),
            packed(REQUESTS, 4 * width),
            packed(5, 2 * width),
            packed(4 * width, 256),
            packed(2 * width, 256),
        ),
        "grouped_gemm": lambda: run_both(
            lambda x, w: grouped.grouped_gemm(x, w, rows), packed(total, 4 * width), packed(REQUESTS, 4 * width, 256)
        ),
        "fp8_rows": lambda: multiply(quantize.quantize_fp8_rows(packed(256, 4 * width))),
        "fp8_mx": lambda: multiply(quantize.quantize_mxfp8(packed(256, 4 * width))),
    }


def usage_of(cubin: bytes, arch: int) -> tuple[int, int]:
    """Registers and bytes of local memory per thread of a compiled kernel, as cuobjdump states them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, frame = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or frame is None:
        raise RuntimeError(f"cuobjdump for sm_{arch} printed no resource usage: {text[:500]!r}")
    return int(registers.group(1)), int(frame.group(1))


def compile_job(operator: str, call: Callable[[], None], arch: int, dtype: torch.dtype, width: int) -> list[Record]:
    """Compile every launch of one call for one target; raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    records: list[Record] = []

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs.setdefault("debug", False)
        kwargs.setdefault("instrumentation_mode", "")
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        options, signature, constexprs, attrs = self._pack_args(backend, kwargs, bound, specialization, options)
        source = triton.compiler.ASTSource(self, signature, constexprs, attrs)
        compiled = triton.compile(source, target=target, options=options.__dict__)
        registers, stack = usage_of(compiled.asm["cubin"], arch)
        records.append(
            Record(
                operator=operator,
                kernel=f"{self.module.removeprefix('kernels.')}.{self.fn.__name__}",
                target=f"sm_{arch}",
                dtype=str(dtype).removeprefix("torch."),
                width=width,
                num_warps=options.num_warps,
                num_stages=options.num_stages,
                registers=registers,
                stack_bytes=stack,
                shared_bytes=compiled.metadata.shared,
            )
        )

    kind = (arch // 10, arch % 10)
    with mock.patch.object(JITFunction, "run", compile_launch), mock.patch.object(configs, "kind_of", lambda _: kind):
        call()
    return records


def main() -> None:
    """Compile everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--target", type=int, choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--quick", action="store_true", help="one shape, one variant of each kernel")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: the interpreter does not compile")
    shapes = [(torch.bfloat16, 64)]
    if not args.quick:
        shapes += [(torch.bfloat16, 128), (torch.float32, 64)]
    records: list[Record] = []
    for dtype, width in shapes:
        for name, call in jobs(dtype, width).items():
            if args.only in name and not (args.quick and name in VARIANTS):
                for arch in args.target or TARGETS:
                    if arch >= FIRST_FP8_TARGET or not name.startswith("fp8"):
                        records += compile_job(name, call, arch, dtype, width)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Record)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(record) for record in records)
    print(
        f"{len(records)} compilations, most local memory per thread {max((r.stack_bytes for r in records), default=0)}"
    )


if __name__ == "__main__":
    main()
