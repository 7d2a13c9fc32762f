"""Bundles with payloads that are no kernels, for tests of what carries bundles around."""

from __future__ import annotations

from pathlib import Path

import pytest

from installed_bundles import install_wheels
from nvgemm_aot.bundle.content import BuiltKernel, BundleContent, ProblemRanking
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_runtime.bundle.format import KernelDesign, sha256_hex
from nvgemm_runtime.bundle.ranking_entries import RankingSource
from nvgemm_runtime.gemm.problem import Problem, Signature
from nvgemm_runtime.gemm.target import read_target
from written_wheels import write_wheel

SIGNATURE = Signature.parse("mm/tn/bf16xbf16/fp32/bf16")


def write_synthetic_bundle(
    path: Path,
    arch: str,
    *,
    platform: str = "linux_x86_64",
    cuda: str = "cu13",
    payload: bytes = b"not a kernel",
    build_key: str = "0" * 64,
) -> Path:
    """Write a bundle of one kernel that is ranked for two problems, for any target."""
    kernel = BuiltKernel(
        payload=payload + arch.encode(),
        signature=SIGNATURE,
        provider="cutlass_operators",
        operator="SyntheticGemm",
        design=KernelDesign(
            tile=(128, 64, 64),
            ctas_per_tile=1,
            cluster=(1, 1),
            fallback_cluster=None,
            scheduler="static_persistent",
        ),
        alignment_bytes=16,
        workspace_bytes=0,
        calling_convention="tvm_ffi:gemm(a,b,out,stream)",
    )
    source = RankingSource(kind="estimate", by="a | model 1.0", gpu="NVIDIA H200")
    rankings = tuple(
        ProblemRanking(
            problem=Problem(signature=SIGNATURE, m=m, n=4096, k=4096),
            source=source,
            kernels=((sha256_hex(kernel.payload), 1000),),
        )
        for m in (16, 1024)
    )
    content = BundleContent(
        target=read_target(arch=arch, platform=platform, cuda=cuda),
        device="H200",
        generator="nvgemm-aot 0.1.0",
        build_key=build_key,
        toolchain={"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15.post2", "ld": "2.40"},
        kernels=(kernel,),
        rankings=rankings,
    )
    write_bundle(path, content)
    return path


def install_lost_and_damaged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Install two wheels alone: one whose bundle is gone, and one whose RECORD is.

    Returns:
        Where the bundle was, and where the metadata of the other lies.
    """
    site = directory / "site"
    bundle = write_synthetic_bundle(directory / "sm_90a.nvgemm", "sm_90a")
    wheels = (
        write_wheel([bundle], name=name, version="1.0", out_dir=directory)
        for name in ("lost", "damaged")
    )
    install_wheels(monkeypatch, site, *wheels)
    (lost,) = (site / "nvgemm_kernels_lost").glob("*.nvgemm")
    lost.unlink()
    (damaged,) = site.glob("nvgemm_kernels_damaged-*.dist-info")
    (damaged / "RECORD").unlink()
    return lost, damaged
