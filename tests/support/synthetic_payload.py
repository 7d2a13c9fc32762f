"""Host shared objects that the system compiler makes: a linked kernel as a loader sees it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from nvgemm_aot.pipeline.linker import c_compiler
from nvgemm_aot.verify.host.host_object import NEEDED_LIBRARIES

BASE_FLAGS = ("-shared", "-nostdlib", "-fPIC", "-O1", "-Wl,--build-id=none", "-Wl,-s")

CALL = (
    "__call__(a: Tensor([n0, n1], bfloat16), b: Tensor([n2, n3], bfloat16), "
    "c: Tensor([n4, n5], bfloat16), stream: Stream)"
)
"""What the launcher of an mm in bf16 shows where it is called with something else."""


def shared_object(
    folder: Path,
    source: str,
    *flags: str,
    libraries: frozenset[str] = NEEDED_LIBRARIES,
) -> bytes:
    """Compile a shared object that names ``libraries``, of which empty ones are made, as needed."""
    (folder / "payload.c").write_text(source)
    for name in libraries:
        stub = [*c_compiler(), *BASE_FLAGS, f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run([*stub, "-o", name], check=True, cwd=folder)
    link = ["-Wl,--no-as-needed", f"-L{folder}", *(f"-l:{name}" for name in sorted(libraries))]
    command = [*c_compiler(), *BASE_FLAGS, *flags, "-o", "payload.so", "payload.c", *link]
    subprocess.run(command, check=True, cwd=folder)
    return (folder / "payload.so").read_bytes()


def host_payload(
    folder: Path,
    *flags: str,
    body: str = "return 0;",
    cubin: bytes = b"",
    call: str = CALL,
    alignment_bytes: int = 16,
    shared_bytes: int | None = 65536,
    clusters: tuple[tuple[int, int], ...] = ((1, 1),),
) -> bytes:
    """A payload around ``cubin`` whose launcher shows what is given here."""
    (folder / "device.bin").write_bytes(cubin)
    said = [f" when calling: `{call}`", f", expected data alignment={alignment_bytes} bytes"]
    launch = "".join(
        f'asm volatile("movabsq ${m | n << 32}, %%rax" ::: "rax");' for m, n in clusters
    )
    if shared_bytes is not None:
        launch += f'long *p; asm volatile("" : "=r"(p)); p[3] = {shared_bytes};'
    source = (
        f'asm(".section .rodata; .incbin \\"{folder}/device.bin\\"; .text");'
        + "".join(f'asm(".section .rodata; .asciz \\"{text}\\"; .text");' for text in said)
        + "int foreign(void); int TVMFFIEnvGetStream(void);"
        + f"int __tvm_ffi_gemm(void) {{ {launch} {body} }}"
    )
    return shared_object(folder, source, *flags)
