"""Kernels that are loaded before a call needs them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cpu_provider
import nvgemm_runtime
from installed_bundles import install_wheels, use
from nvgemm_aot.bundle.content import BundleContent, read_content
from nvgemm_aot.bundle.parts.copied_frames import open_whole
from nvgemm_aot.bundle.parts.split_bundle import part_name, split_into
from nvgemm_aot.bundle.wheel_set import encode_wheels
from nvgemm_aot.bundle.writer import write_bundle
from nvgemm_aot.emulator.checking.every_signature import EVERY_SIGNATURE
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.errors import NoKernelError
from nvgemm_runtime.gemm.problem import Signature
from nvgemm_runtime.gemm.roles import roles
from nvgemm_runtime.launch import compiled, preload, select
from nvgemm_runtime.launch.loading import native, upload
from nvgemm_runtime.launch.loading.loader import KernelLoader, LoadedKernel
from paged_bundles import damage_list, write_in_pages
from synthetic_content import synthetic_content

CPU = torch.device("cpu")

Launch = tuple[str, tuple[torch.Size, ...]]
"""The id of a kernel that was launched, and the shapes of its operands."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of a kernel that is loaded from now on; kernels are loaded anew."""
    found: list[Launch] = []

    class Noting(KernelLoader):
        def _load(self, bundle: Any, kernel: Any) -> LoadedKernel:
            loaded = super()._load(bundle, kernel)

            def launch(*tensors: torch.Tensor) -> None:
                loaded.launch(*tensors)
                found.append((kernel.id, tuple(one.shape for one in tensors)))

            return replace(loaded, launch=launch)

    monkeypatch.setattr(select, "LOADER", Noting())
    monkeypatch.setattr(compiled, "_origins", {})
    monkeypatch.setattr(compiled, "_warned", set())
    return found


@pytest.fixture
def some(kernel_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltBundle:
    """A bundle with several kernels for each of three problems; two have the same first one."""
    sizes = ((16, 32, 64), (32, 32, 64), (1, 4, 64))
    built = cpu_provider.build_bundle(
        [cpu_provider.problem(sizes=one) for one in sizes], tmp_path, kernel_cache
    )
    use(monkeypatch, built.path)
    return built


def name_of(built: BuiltBundle) -> str:
    return built.path.stem.removesuffix(f"-{built.header.target.key}")


def first_of_each(built: BuiltBundle) -> set[str]:
    kernels = built.header.kernels
    return {kernels[ranking.kernels[0].kernel].id for ranking in built.header.rankings}


def test_the_first_kernel_of_each_problem_is_launched_once(
    some: BuiltBundle, launched: list[Launch]
) -> None:
    steps: list[tuple[int, int]] = []
    wanted = first_of_each(some)
    assert 1 < len(wanted) < len(some.header.kernels)
    done = nvgemm_runtime.preload(name_of(some), progress=lambda *step: steps.append(step))
    assert sorted(id_ for id_, _ in launched) == sorted(wanted)
    assert (done.kernels, dict(done.failures)) == (len(wanted), {})
    assert steps == [(one, len(wanted)) for one in range(1, len(wanted) + 1)]
    content = {kernel.id: kernel.span.content_bytes for kernel in some.header.kernels}
    assert done.code_bytes == sum(content[id_] for id_ in wanted)
    assert done.device_bytes == 0
    assert done.seconds > 0


def test_of_a_bundle_for_several_products_the_first_kernels_here_are_loaded(
    some: BuiltBundle, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bundle(some.path) as bundle:
        content = read_content(bundle)
    last = [one.kernels[-1][0] for one in content.rankings]
    for here, wanted in (("another CPU", first_of_each(some)), ("cpu", {*last})):
        further = tuple(
            replace(
                one,
                source=replace(one.source, gpu=here),
                kernels=one.kernels[::-1],
                is_further=True,
            )
            for one in content.rankings
        )
        first = tuple(
            replace(one, source=replace(one.source, gpu="cpu" if here != "cpu" else "first"))
            for one in content.rankings
        )
        write_bundle(some.path, replace(content, rankings=(*first, *further)))
        use(monkeypatch, some.path)
        launched.clear()
        nvgemm_runtime.preload(name_of(some))
        assert {id_ for id_, _ in launched} == wanted
        monkeypatch.setattr(select, "LOADER", type(select.LOADER)())


@pytest.mark.parametrize(
    ("bundle", "signatures"),
    [("cpu_bundle", cpu_provider.SIGNATURES), ("fused_bundle", cpu_provider.FUSED)],
)
def test_kernels_of_all_conventions_take_the_operands_that_they_get(
    bundle: str,
    signatures: tuple[Signature, ...],
    request: pytest.FixtureRequest,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: BuiltBundle = request.getfixturevalue(bundle)
    use(monkeypatch, built.path)
    done = nvgemm_runtime.preload(name_of(built))
    assert dict(done.failures) == {}
    of_kernel = {kernel.id: kernel.signature for kernel in built.header.kernels}
    assert {of_kernel[id_] for id_, _ in launched} == set(signatures)


def test_without_a_name_kernels_of_groups_are_loaded_once_experts_are_imported(
    fused_bundle: BuiltBundle, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, fused_bundle.path)
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "nvgemm_runtime.moe", raising=False)
        assert nvgemm_runtime.preload().kernels == 0
    importlib.import_module("nvgemm_runtime.moe")
    header = fused_bundle.header
    wanted = {
        header.kernels[ranking.kernels[0].kernel].id
        for ranking in header.rankings
        if ranking.problem.signature.op.is_moe
    }
    done = nvgemm_runtime.preload()
    assert {id_ for id_, _ in launched} == wanted
    assert (done.kernels, dict(done.failures)) == (len(wanted), {})
    monkeypatch.setenv("NVGEMM_AOT", "off")
    assert nvgemm_runtime.preload().kernels == 0


def test_operands_of_every_row_pass_the_launchers_checks(
    lib: native.Native, some: BuiltBundle
) -> None:
    """In deterministic mode torch fills what it allocates, which it cannot for every type."""
    called: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def kernel_function(_: object, __: object, count: int, ___: object) -> int:
        called.append(count)
        return 0

    address = ctypes.cast(kernel_function, ctypes.c_void_p).value
    assert address is not None
    loaded = compiled.load_for(some.header.kernels[0].id, compiled._device_facts(CPU))
    torch.use_deterministic_algorithms(True)
    try:
        for number, signature in enumerate(EVERY_SIGNATURE):
            parameters = ",".join(role.value for role in roles(signature))
            convention = parse_calling_convention(f"tvm_ffi:gemm({parameters},stream)")
            assert convention is not None
            handle = lib.register_kernel(
                id=f"row {number}",
                function_address=address,
                signature=signature,
                alignment_bytes=16,
                target=None,
                convention=convention,
            )
            kernel = replace(loaded.kernel, signature=signature, alignment_bytes=16)
            launch = functools.partial(lib.launch, handle)
            assert upload.upload(replace(loaded, kernel=kernel, launch=launch), CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert called == [len(roles(signature)) + 1 for signature in EVERY_SIGNATURE]


def test_kernels_of_generated_code_are_loaded_and_others_are_not(
    some: BuiltBundle, launched: list[Launch]
) -> None:
    first, second, *_ = (kernel.id for kernel in some.header.kernels)
    call = compiled.gemm(torch.mm, first, "a wheel")
    compiled.gemm(torch.addmm, second, "a wheel", (1, 2, 0), True)
    assert launched == []  # nothing runs on this process's device yet
    assert nvgemm_runtime.preload().kernels == 2
    assert [id_ for id_, _ in launched] == [first, second]
    a, b, out = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    torch.testing.assert_close(call(a, b, out=out), a @ b)


def test_without_generated_code_there_is_nothing_to_load(
    some: BuiltBundle, launched: list[Launch]
) -> None:
    done = nvgemm_runtime.preload()
    assert (done.kernels, done.code_bytes, dict(done.failures), launched) == (0, 0, {}, [])


def test_a_kernel_that_cannot_be_loaded_is_named_and_stops_no_other(
    some: BuiltBundle, launched: list[Launch]
) -> None:
    there = some.header.kernels[0].id
    for id_ in ("0" * 64, there):
        compiled.gemm(torch.mm, id_, "a wheel")
    done = nvgemm_runtime.preload()
    assert done.kernels == 1
    assert [id_ for id_, _ in launched] == [there]
    assert list(done.failures) == ["0" * 64]
    assert "no installed bundle holds kernel 000000000000" in done.failures["0" * 64]


@pytest.fixture
def for_hopper(some: BuiltBundle, monkeypatch: pytest.MonkeyPatch) -> BundleContent:
    """A bundle for another device, beside the one for this one."""
    content = synthetic_content(kernels=4, problems=3)
    content = replace(content, target=replace(content.target, arch="sm_90a"))
    path = some.path.with_name(f"{name_of(some)}-{content.target.key}.nvgemm")
    write_bundle(path, content)
    use(monkeypatch, some.path, path)
    return content


@pytest.mark.parametrize("by", ["graphs", "manifest"])
def test_kernels_for_another_device_are_left_alone_and_no_failures(
    by: str, some: BuiltBundle, for_hopper: BundleContent, launched: list[Launch]
) -> None:
    here, elsewhere = first_of_each(some), {one.kernels[0][0] for one in for_hopper.rankings}
    steps: list[tuple[int, int]] = []
    if by == "graphs":
        for id_ in (*elsewhere, *here):
            compiled.gemm(torch.mm, id_, "a wheel")
    manifest = None if by == "graphs" else name_of(some)
    done = nvgemm_runtime.preload(manifest, progress=lambda *step: steps.append(step))
    assert (done.kernels, dict(done.failures)) == (len(here), {})
    assert {id_ for id_, _ in launched} == here
    assert steps[-1] == (len(here), len(here))
    assert set(done.skipped) == elsewhere
    assert set(done.skipped.values()) == {"built for sm_90a, this device is cpu"}


def test_a_kernel_that_fails_when_launched_is_named(
    some: BuiltBundle, monkeypatch: pytest.MonkeyPatch, launched: list[Launch]
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("no such code for this device")

    monkeypatch.setattr(preload, "upload", fail)
    done = nvgemm_runtime.preload(name_of(some))
    assert done.kernels == done.code_bytes == 0
    assert set(done.failures) == first_of_each(some)
    assert set(done.failures.values()) == {"no such code for this device"}


def test_off_loads_nothing(
    some: BuiltBundle, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVGEMM_AOT", "off")
    assert nvgemm_runtime.preload(name_of(some)).kernels == 0
    assert launched == []


def test_an_unknown_manifest_is_told_with_what_there_is(some: BuiltBundle) -> None:
    with pytest.raises(NoKernelError, match="no bundle of manifest other is installed") as raised:
        nvgemm_runtime.preload("other")
    assert "NVGEMM_AOT_BUNDLES" in str(raised.value)
    assert "install the wheel nvgemm-kernels-other" in str(raised.value)


@pytest.mark.parametrize("by", ["file", "wheel"])
def test_all_parts_of_a_manifests_bundle_are_loaded(
    by: str,
    some: BuiltBundle,
    tmp_path: Path,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Bundle(some.path) as bundle:
        parts = split_into(open_whole(bundle), 2)
    names = [part_name(some.path, some.header.target.key, one, 2) for one in (1, 2)]
    paths = [tmp_path / "parts" / name for name in names]
    paths[0].parent.mkdir()
    for path, part in zip(paths, parts):
        path.write_bytes(part.data)
    if by == "file":
        use(monkeypatch, *paths)
    else:
        site = tmp_path / "site"
        use(monkeypatch)
        wheels = encode_wheels(paths, name=name_of(some), version="1.0")
        assert len(wheels) == 2
        for wheel in wheels:
            (tmp_path / wheel.filename).write_bytes(wheel.data)
        files = [tmp_path / wheel.filename for wheel in wheels]
        monkeypatch.delenv("NVGEMM_AOT_BUNDLES")
        install_wheels(monkeypatch, site, *files)
    done = nvgemm_runtime.preload(name_of(some))
    assert {id_ for id_, _ in launched} == first_of_each(some)
    assert dict(done.failures) == {}
    with pytest.raises(NoKernelError):
        nvgemm_runtime.preload(name_of(some)[:-1])


@pytest.mark.parametrize("by", ["manifest", "experts"])
def test_a_damaged_bundle_is_logged_and_stops_no_other(
    by: str,
    fused_bundle: BuiltBundle,
    tmp_path: Path,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    importlib.import_module("nvgemm_runtime.moe")
    damaged = tmp_path / fused_bundle.path.name
    with Bundle(fused_bundle.path) as bundle:
        write_in_pages(damaged, read_content(bundle))
    damage_list(damaged, "rankings")
    use(monkeypatch, damaged, fused_bundle.path)
    done = nvgemm_runtime.preload(name_of(fused_bundle) if by == "manifest" else None)
    assert done.kernels == len({id_ for id_, _ in launched}) > 0
    assert dict(done.failures) == {}
    assert "[page-digest]" in caplog.text


def test_kernels_whose_results_depend_on_timing_stay_away_from_deterministic_programs(
    kernel_cache: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[Launch],
) -> None:
    built = cpu_provider.build_bundle(
        [cpu_provider.problem()], tmp_path, kernel_cache, provider=cpu_provider.TimingDependent()
    )
    use(monkeypatch, built.path)
    compiled.gemm(torch.mm, built.header.kernels[0].id, "a wheel")
    torch.use_deterministic_algorithms(True)
    try:
        assert nvgemm_runtime.preload(name_of(built)).kernels == 0
        (reason,) = nvgemm_runtime.preload().failures.values()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "results depend on timing" in reason
    assert launched == []


def test_generated_code_loads_its_kernels_where_its_device_is_in_use(
    some: BuiltBundle, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may load it while its tensors are fake, and the kernel must get real ones."""
    monkeypatch.setattr(compiled, "_device_at_hand", lambda: CPU)
    kernel = some.header.kernels[0].id
    with FakeTensorMode():
        call = compiled.gemm(torch.mm, kernel, "a wheel")
    assert [id_ for id_, _ in launched] == [kernel]
    a, b, out = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    torch.testing.assert_close(call(a, b, out=out), a @ b)


def test_generated_code_loads_though_a_kernel_cannot_be_loaded_ahead(
    some: BuiltBundle,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compiled, "_device_at_hand", lambda: CPU)
    monkeypatch.setattr(compiled, "upload", fail)
    a, b, out = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    with caplog.at_level(logging.WARNING):
        call = compiled.gemm(torch.mm, some.header.kernels[0].id, "a wheel")
        torch.testing.assert_close(call(a, b, out=out), a @ b)
    assert caplog.text == ""
    call = compiled.gemm(torch.mm, "0" * 64, "another wheel")
    assert caplog.text == ""  # its first call tells
    torch.testing.assert_close(call(a, b, out=out), a @ b)
    assert "instead of the kernels of another wheel" in caplog.text


def test_a_kernel_for_another_device_than_the_current_one_is_not_warned_of(
    some: BuiltBundle,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph on the CPU, or on a second GPU, whose module is loaded where CUDA is in use."""
    monkeypatch.setattr(compiled, "_device_at_hand", lambda: torch.device("cuda", 0))
    facts_of_cpu = compiled._device_facts(CPU)
    hopper = replace(facts_of_cpu, name="H200", capability=(9, 0))
    monkeypatch.setattr(
        compiled, "_device_facts", lambda device: facts_of_cpu if device == CPU else hopper
    )
    a, b, out = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    with caplog.at_level(logging.WARNING):
        call = compiled.gemm(torch.mm, some.header.kernels[0].id, "a wheel")
        torch.testing.assert_close(call(a, b, out=out), a @ b)
    assert caplog.text == ""


class Devices:
    """Two simulated CUDA devices; a graph is captured on the second one's current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current == 1)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


def test_nothing_is_launched_into_a_graph_under_capture(
    some: BuiltBundle, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another device than the kernel's is the current one."""
    Devices(monkeypatch)
    loaded = compiled.load_for(some.header.kernels[0].id, compiled._device_facts(None))
    assert not upload.upload(loaded, torch.device("cuda", 1))
    assert launched == []


@pytest.mark.parametrize(("device", "waits"), [("cuda:0", True), ("cuda:1", False)])
def test_a_preload_does_not_wait_for_a_device_under_capture(
    device: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting there is an error, which ends the capture."""
    Devices(monkeypatch)
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(preload, "named_kernels", dict)
    monkeypatch.setattr(preload, "_free_bytes", lambda device: 0)
    facts = compiled._device_facts(CPU)
    monkeypatch.setattr(preload, "device_facts", lambda *_: facts)
    nvgemm_runtime.preload(device=device)
    assert waited == [torch.device(device)] * waits


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1)])
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r"device is .*cuda.*, and torch sees 0 CUDA devices: name"
    ):
        nvgemm_runtime.preload(device=device)


@pytest.mark.parametrize(
    "device", ["xpu", "meta", "bogus", "", 0, -1, 256, 10**20, 3.5, torch.device("mps")]
)
def test_what_is_no_device_for_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | str | int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"preload: device is .*, and torch sees 0 CUDA devices: "):
        nvgemm_runtime.preload(device=device)


def test_a_manifest_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="preload: manifest is '', must be a manifest's name"):
        nvgemm_runtime.preload("")
    with pytest.raises(TypeError, match="preload: manifest is 3, must be a manifest's name"):
        nvgemm_runtime.preload(3)  # type: ignore[arg-type]
