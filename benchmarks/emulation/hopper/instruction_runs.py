"""Runs cases on a GPU, each failure by itself; and in the emulator, beside what the GPU gave."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulation.hopper.cuda_driver import FILL, CudaDriver, DriverCallError
from benchmarks.emulation.hopper.elementwise_cases import elementwise_cases
from benchmarks.emulation.hopper.instruction_case import Bytes, Case, comparable, ulps_between
from benchmarks.emulation.hopper.memory_cases import memory_cases
from benchmarks.emulation.hopper.outcomes import CLOSE, DIFFERENT, EQUAL, REFUSED
from benchmarks.emulation.hopper.wgmma_cases import wgmma_cases

_PATIENCE_S = 20
"""Seconds in which a case must end."""

_LARGEST_ERROR = 2**-12
"""Error over the largest value in cases without a limit in units of the last place. An H100's sums
of fp8 differ from exact ones by 2**-12.6."""

_ADDRESS = struct.Struct("<Q")
"""First field of a tensor map."""


def all_cases() -> dict[str, Case]:
    """Returns every case by its name."""
    found = [*elementwise_cases(), *memory_cases(), *wgmma_cases()]
    cases = {case.name: case for case in found}
    assert len(cases) == len(found)
    return cases


def pack(data: bytes) -> str:
    """Returns bytes as compressed text."""
    return base64.b85encode(zlib.compress(data, 9)).decode()


def unpack(text: str) -> bytes:
    """Returns what `pack` packed."""
    return zlib.decompress(base64.b85decode(text))


def digest(output: Bytes, result: str) -> str:
    """Returns the SHA-256 of a result in which all NaN count as one."""
    return hashlib.sha256(comparable(output, result).tobytes()).hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file with one in each line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_on_gpu(path: Path) -> None:
    """Runs every case in child processes and writes a line for each.

    A case that breaks its process or hangs gets an error; the next process goes on behind it.
    """
    path.unlink(missing_ok=True)
    names = list(all_cases())
    while len(done := read_lines(path)) < len(names):
        before = len(done)
        command = [
            sys.executable,
            "-m",
            "benchmarks.emulation.hopper",
            "instruction-worker",
            str(path),
        ]
        child = subprocess.Popen(command)
        last, since = before, time.monotonic()
        while child.poll() is None and time.monotonic() - since < _PATIENCE_S:
            time.sleep(0.05)
            if (count := len(read_lines(path))) != last:
                last, since = count, time.monotonic()
        status = child.poll()
        child.kill()
        child.wait()
        count = len(read_lines(path))
        if count < len(names) and (status != 0 or count == before):
            reason = "hangs" if status is None else f"the process ended with status {status}"
            _append(path, {"case": names[count], "error": reason})


def work(path: Path) -> None:
    """Runs the cases that a file lacks, and ends when one fails."""
    driver = CudaDriver()
    for case in list(all_cases().values())[len(read_lines(path)) :]:
        line: dict[str, Any] = {
            "case": case.name,
            "fingerprint": case.fingerprint(),
            "device": driver.device,
            "driver": driver.version,
        }
        try:
            output, maps = driver.run(case)
        except DriverCallError as error:
            _append(path, {**line, "error": str(error)})
            return
        line["sha256"] = digest(output, case.result)
        line["output"] = pack(output.tobytes())
        line["maps"] = [each.hex() for each in maps]
        _append(path, line)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def condensed(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns lines without the outputs whose digest is enough to compare them."""
    cases = all_cases()
    return [
        {
            key: value
            for key, value in line.items()
            if key != "output" or cases[line["case"]].ulps != 0
        }
        for line in lines
    ]


def emulate(case: Case, maps: Iterable[bytes], *, seed: int = 0, delay: int = 0) -> Bytes:
    """Returns a case's output from the emulator.

    Args:
        case: The case.
        maps: Tensor maps as a driver encodes them; addresses are replaced.
        seed: Schedule's seed.
        delay: Rounds by which asynchronous effects are late, at most.

    Raises:
        EmulationError: If the emulator does not know an instruction, or the kernel is wrong.
    """
    from nvgemm_aot.emulator.machine.global_memory import GlobalMemory, Region
    from nvgemm_aot.emulator.machine.launch import Launch, Schedule
    from nvgemm_aot.emulator.ptx.parser import parse
    from nvgemm_aot.emulator.run import execute

    given = case.input()
    buffers = {"input": _aligned(len(given)), "output": _aligned(case.output_bytes)}
    buffers["input"][:] = given
    buffers["output"][:] = FILL
    parameters = bytearray()
    for spec, encoded in zip(case.maps, maps, strict=True):
        address = buffers[spec.buffer].ctypes.data + spec.offset
        parameters += _ADDRESS.pack(address) + encoded[_ADDRESS.size :]
    for data in buffers.values():
        parameters += _ADDRESS.pack(data.ctypes.data)
    regions = [
        Region(address=data.ctypes.data, data=data, name=name, writable=name == "output")
        for name, data in buffers.items()
    ]
    launch = Launch(
        grid=(case.blocks, 1, 1),
        block=(case.threads, 1, 1),
        cluster=(case.cluster, 1, 1),
        shared_bytes=case.shared,
        parameters=bytes(parameters),
    )
    execute(parse(case.ptx()), launch, GlobalMemory(regions), Schedule(seed=seed, delay=delay))
    return buffers["output"]


def _aligned(size: int, alignment: int = 256) -> Bytes:
    raw = np.zeros(size + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    return raw[begin : begin + size]


def compare(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields each case's name and its outcome, which begins with one of `OUTCOMES` or a reason."""
    from nvgemm_aot.emulator.emulation_errors import EmulationError

    cases = all_cases()
    for line in lines:
        case = cases[line["case"]]
        if "error" in line:
            yield case.name, f"{REFUSED}: {line['error']}"
            continue
        if line["fingerprint"] != case.fingerprint():
            yield case.name, "another kernel or input than the GPU ran"
            continue
        try:
            output = emulate(case, map(bytes.fromhex, line["maps"]))
        except EmulationError as error:
            yield case.name, f"{type(error).__name__}: {error}"
            continue
        yield case.name, outcome(case, output, line)


def outcome(case: Case, output: Bytes, line: dict[str, Any]) -> str:
    """Returns `equal`, `close` within the case's limit, or the difference from a GPU's line."""
    if digest(output, case.result) == line["sha256"]:
        return EQUAL
    if "output" not in line:
        return DIFFERENT
    expected = np.frombuffer(unpack(line["output"]), np.uint8)
    if case.result == "bits":
        words = output.view(np.uint32) != expected.view(np.uint32)
        first = int(np.flatnonzero(words)[0])
        return (
            f"{words.sum()} of {len(words)} words differ, first {first}: "
            f"{output.view(np.uint32)[first]:#x}, GPU {expected.view(np.uint32)[first]:#x}"
        )
    distance = ulps_between(output, expected, case.result)
    differ = int((comparable(output, case.result) != comparable(expected, case.result)).sum())
    count = len(comparable(output, case.result))
    text = f"{differ} of {count} differ, by at most {distance} ulps"
    if case.ulps is None:
        error = _error(output, expected, case.result)
        text += f", {error:.1e} of the largest"
        allowed = error <= _LARGEST_ERROR
    else:
        allowed = distance <= case.ulps
    return f"{CLOSE}: {text}" if allowed else text


def _error(output: Bytes, expected: Bytes, result: str) -> float:
    """Returns the largest error over the largest value; infinite if other values are finite."""
    dtype = {"f16": np.float16, "f32": np.float32}[result]
    values, wanted = (each.view(dtype).astype(np.float64) for each in (output, expected))
    finite = np.isfinite(wanted)
    if (np.isfinite(values) != finite).any():
        return float("inf")
    return float(np.abs(values[finite] - wanted[finite]).max() / np.abs(wanted[finite]).max())
