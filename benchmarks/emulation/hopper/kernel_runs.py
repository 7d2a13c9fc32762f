"""Runs a bundle's kernels on seeded operands, on a GPU or on an emulated one."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.emulation.hopper.instruction_runs import pack, read_lines, unpack
from benchmarks.emulation.hopper.outcomes import CLOSE, EQUAL, NOT_KEPT, REFUSED

sys.path.append(str(Path(__file__).parents[3] / "tests/gpu"))
from draws import SeededDraws
from edges import edges, problem_of
from gemm_arguments import Arguments, exact_arguments, random_arguments

from nvgemm_aot.emulator.checking.small_problems import size_steps
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.launch.select import load_kernel

_CLOSE = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 2**-20}
"""Largest error of a close result, over the largest value: one step of 16 bits there."""

KEPT_BYTES = 1 << 19
"""Results up to this size are kept whole; of larger ones, their digest."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A kernel, a problem and the kind of its operands."""

    kernel: Kernel
    problem: Problem
    exact: bool

    @property
    def name(self) -> str:
        """Names the case in records."""
        problem = self.problem
        sizes = f"{problem.m}x{problem.n}x{problem.k}/{problem.batch}/{problem.groups}"
        return f"{self.kernel.id[:16]}/{sizes}/{'exact' if self.exact else 'random'}"

    def arguments(self, device: str) -> Arguments:
        """Returns the operands, made on the CPU so that every machine has the same."""
        draws = SeededDraws(zlib.crc32(self.name.encode()), "cpu")
        make = exact_arguments if self.exact else random_arguments
        made = make(self.problem, "cpu", draws)
        moved = {role: tensor.to(device) for role, tensor in made.tensors.items()}
        return Arguments(problem=made.problem, tensors=moved, has_exact_sums=made.has_exact_sums)


def cases_of(bundle: Path) -> Iterator[KernelCase]:
    """Yields a small and a larger problem of whole numbers for each kernel, and a random one."""
    with Bundle(bundle) as opened:
        kernels = [each for each in opened.header.kernels if isinstance(each, Kernel)]
    for kernel in sorted(kernels, key=lambda each: each.id):
        signature = kernel.signature
        small = edges(signature, kernel.alignment_bytes)[1]
        step_m, step_n, step_k = size_steps(signature, kernel.alignment_bytes)
        rows = -(-200 // step_m) * step_m
        larger = problem_of(signature, rows, 256 + step_n, 192 + step_k, count=3)
        yield KernelCase(kernel=kernel, problem=small, exact=True)
        yield KernelCase(kernel=kernel, problem=larger, exact=True)
        yield KernelCase(kernel=kernel, problem=small, exact=False)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def operands_digest(arguments: Arguments) -> str:
    """Returns a digest of all tensors but the result, by role."""
    joined = hashlib.sha256()
    for role in sorted(arguments.tensors, key=lambda each: each.value):
        if role not in (Role.OUT, Role.SUMS):
            joined.update(role.value.encode())
            joined.update(_bytes(arguments.tensors[role]))
    return joined.hexdigest()


def run_case(case: KernelCase, device: str) -> dict[str, Any]:
    """Runs a case and returns its record."""
    arguments = case.arguments(device)
    line: dict[str, Any] = {
        "case": case.name,
        "kernel": case.kernel.id,
        "operator": case.kernel.operator,
        "signature": case.kernel.signature.key,
        "operands_sha256": operands_digest(arguments),
    }
    begin = time.monotonic()
    load_kernel(case.kernel.id).launch(arguments.a, arguments.b, arguments.out, *arguments.others)
    if device == "cuda":
        torch.cuda.synchronize()
    line["seconds"] = round(time.monotonic() - begin, 3)
    for role in (Role.OUT, Role.SUMS):
        if role in arguments.tensors:
            data = _bytes(arguments.tensors[role])
            line[role.value] = {"sha256": _sha256(data), "bytes": len(data)}
            if len(data) <= KEPT_BYTES:
                line[role.value]["data"] = pack(data)
    return line


def run_all(bundle: Path, path: Path, device: str, only: str = "") -> None:
    """Runs every case whose name or operator has a text in it; appends a line for each."""
    done = {line["case"] for line in read_lines(path)}
    for case in cases_of(bundle):
        if case.name in done or (only not in case.name and only not in case.kernel.operator):
            continue
        try:
            line = run_case(case, device)
        except Exception as error:  # one kernel's failure is a row of the table
            line = {
                "case": case.name,
                "operator": case.kernel.operator,
                "signature": case.kernel.signature.key,
                "error": f"{type(error).__name__}: {error}",
            }
        if device == "cuda":
            line["device"] = torch.cuda.get_device_name()
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _ordered(data: bytes, kind: str) -> np.ndarray:
    """Returns a result as integers in the order of its values."""
    if kind in ("int8", "uint8", "int32"):
        dtype = {"int8": np.int8, "uint8": np.uint8, "int32": np.int32}[kind]
        return np.frombuffer(data, dtype).astype(np.int64)
    bits = {"fp32": 32, "fp16": 16, "bf16": 16}.get(kind, 8)
    codes = np.frombuffer(data, np.dtype(f"u{bits // 8}")).astype(np.int64)
    top = 1 << (bits - 1)
    return np.where(codes >= top, top - codes, codes)


def _values(data: bytes, kind: str) -> np.ndarray | None:
    """Returns a result's values, or None for 8 bits."""
    if kind == "bf16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    dtype = {"fp16": np.float16, "fp32": np.float32}.get(kind)
    return None if dtype is None else np.frombuffer(data, dtype).astype(np.float64)


def compare(
    gpu: Iterable[dict[str, Any]], emulated: Iterable[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields each case's name and outcome: one of `OUTCOMES` with details, or another reason."""
    by_name = {line["case"]: line for line in emulated}
    for line in gpu:
        other = by_name.get(line["case"])
        name = f"{line['signature']} {line['case']}"
        if "error" in line:
            yield name, f"{REFUSED}: {line['error']}"
        elif other is None:
            yield name, "not emulated"
        elif "error" in other:
            yield name, other["error"]
        elif line["operands_sha256"] != other["operands_sha256"]:
            yield name, "other operands"
        else:
            dtypes = {"out": line["signature"].split("/")[4], "sums": "fp32"}
            parts = [_outcome(line[key], other[key], dtypes[key]) for key in dtypes if key in line]
            yield name, max(parts, key=lambda part: (part != EQUAL, not part.startswith(CLOSE)))


def _outcome(gpu: dict[str, Any], emulated: dict[str, Any], dtype: str) -> str:
    if gpu["sha256"] == emulated["sha256"]:
        return EQUAL
    if "data" not in gpu or "data" not in emulated:
        return NOT_KEPT
    first, second = (_ordered(unpack(each["data"]), dtype) for each in (gpu, emulated))
    distance = np.abs(first - second)
    text = f"{int((distance > 0).sum())} of {len(first)} differ, by at most {distance.max()} ulps"
    values = [_values(unpack(each["data"]), dtype) for each in (gpu, emulated)]
    if values[0] is None or values[1] is None:
        is_close = distance.max() <= (0 if "int" in dtype else 1)
    else:
        error = np.abs(values[0] - values[1]).max() / np.abs(values[0]).max()
        text += f", {error:.1e} of the largest"
        is_close = error <= _CLOSE[dtype]
    return f"{CLOSE}: {text}" if is_close else text
