"""Kernels that take more than tensors and a stream: a workspace, and numbers of the device.

A workspace is what thread blocks share that split k, or that take their tiles from a counter. Its
first part must be zero, and torch's allocator gives the memory. It is poisoned here before each
launch, as a launch that was killed may leave it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from edges import edges, problem_of
from gemm_arguments import Arguments, exact_arguments, random_arguments
from gemm_reference import assert_close, assert_exact, has_exact_results
from installed import installed_kernels, launch

from nvgemm_aot.emulator.checking.small_problems import size_steps
from nvgemm_aot.providers.base import DYNAMIC_PERSISTENT
from nvgemm_aot.targets.profile import load_profile, profile_names
from nvgemm_runtime.bundle.calling_convention import parse_calling_convention
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.bundle.reader import Bundle
from nvgemm_runtime.gemm.operands import torch_dtype
from nvgemm_runtime.gemm.problem import Problem
from nvgemm_runtime.launch.api import choose, explain, load_operators, mm
from nvgemm_runtime.launch.compiled import gemm
from nvgemm_runtime.launch.loading import native
from nvgemm_runtime.launch.select import load_kernel

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LARGE_K = 8192


SHARING = [kernel for _, kernel in installed_kernels() if kernel.workspace is not None]
"""Installed kernels whose thread blocks share memory besides the operands."""

every_sharing_kernel = pytest.mark.parametrize(
    "kernel", SHARING, ids=[f"{k.id[:12]}-{k.operator}-{k.signature.key}" for k in SHARING]
)

KINDS = ("ordered", "any order", "dynamic")


def kind_of(kernel: Kernel) -> str:
    """How thread blocks share: parts of a sum in a fixed order, in any, or what is to be done."""
    if kernel.design.splits > 1:
        return "ordered" if kernel.is_deterministic else "any order"
    return "dynamic" if kernel.design.scheduler == DYNAMIC_PERSISTENT else "unknown"


def test_all_kinds_of_sharing_kernels_are_installed() -> None:
    assert {kind_of(kernel) for kernel in SHARING} == {*KINDS}, "install the wheel split-k"
    more = {(kind_of(one), one.signature.epilogue is not None) for one in SHARING}
    assert {("ordered", True), ("dynamic", True)} <= more
    assert any(one.signature.scales is not None for one in SHARING)


def find_kernel(kind: str, key: str = "mm/") -> Kernel:
    """A plain sharing kernel of a kind, whose signature begins so."""
    for found in SHARING:
        signature = found.signature
        is_plain = signature.epilogue is None and signature.scales is None
        if is_plain and kind_of(found) == kind and signature.key.startswith(key):
            return found
    pytest.fail(f"no installed kernel of {key} is {kind}")


@pytest.fixture(params=KINDS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """A plain mm kernel of each kind."""
    return find_kernel(request.param)


def busy(kernel: Kernel, m: int = 64) -> Problem:
    """A problem at which thread blocks share: of a long sum, or of several waves of tiles."""
    step_m, _, _ = size_steps(kernel.signature, kernel.alignment_bytes)
    if kind_of(kernel) == "dynamic":
        m, n, k = 48 * m, 4096, 512
    else:
        n, k = 1024, LARGE_K
    return problem_of(kernel.signature, -(-m // step_m) * step_m, n, k, count=2)


def poison_free_memory(kernel: Kernel, problem: Problem, device: str = "cuda") -> None:
    """Fill the memory that the next launch gets as its workspace with ones."""
    assert kernel.workspace is not None
    size = kernel.workspace.size_bytes(problem)
    torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF)


def sizes(kernel: Kernel) -> Iterator[Problem]:
    """Edges, among them sums of fewer tiles of k than there are parts, and what keeps all busy."""
    yield from edges(kernel.signature, kernel.alignment_bytes)
    step_m, _, _ = size_steps(kernel.signature, kernel.alignment_bytes)
    long = [(1, 1024), (17, 1032), (200, 512), (1100, 2048)]
    many = [(3000, 4104), (8192, 5120), (129, 24576)]
    is_dynamic = kind_of(kernel) == "dynamic"
    k = 320 if is_dynamic else LARGE_K
    for m, n in many if is_dynamic else long:
        # Of fp8, rows of a result are aligned to 16 columns.
        n = -(-n // 16) * 16
        yield problem_of(kernel.signature, -(-m // step_m) * step_m, n, k, count=2)


def assert_right(out: torch.Tensor, arguments: Arguments) -> None:
    """Exact where the signature's results can be."""
    if has_exact_results(arguments.problem.signature):
        assert_exact(out, arguments)
    else:
        assert_close(out, arguments)


@every_sharing_kernel
def test_is_exact_whatever_its_workspace_held_before(kernel: Kernel) -> None:
    for problem in sizes(kernel):
        arguments = exact_arguments(problem)
        poison_free_memory(kernel, problem)
        assert_right(launch(kernel, arguments), arguments)


@every_sharing_kernel
def test_equal_operands_give_equal_results_where_the_entry_says_so(kernel: Kernel) -> None:
    arguments = random_arguments(busy(kernel, 16))
    first = launch(kernel, arguments).clone()
    assert_close(first, arguments)
    for _ in range(20):
        arguments.out.fill_(float("nan"))
        again = launch(kernel, arguments)
        if kernel.is_deterministic:
            assert torch.equal(again, first)
        else:
            assert_close(again, arguments)


def mm_arguments(kernel: Kernel, m: int = 64, device: str = "cuda") -> Arguments:
    return exact_arguments(busy(kernel, m), device)


def test_cuda_graphs_capture_memory_and_filling(kernel: Kernel) -> None:
    load_operators()
    arguments = mm_arguments(kernel)
    a, b, out = arguments.operands()
    launch(kernel, arguments)
    assert kernel.workspace is not None
    size = kernel.workspace.size_bytes(arguments.problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # each launch finds what the one before, or the poison, left
            torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xFF)
            mm(a, b, out, kernel=kernel.id)
        second = torch.ops.nvgemm_aot.mm(a, b, kernel.id)
    for _ in range(5):
        a.copy_(torch.rand_like(a) < 0.02)  # few enough for every sum to be exact
        out.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_exact(out, arguments)
        assert_exact(second, arguments)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_the_driver_may_be_asked_for_clusters_during_a_capture() -> None:
    script = (
        "import sys, torch\n"
        "from nvgemm_runtime.launch.loading import native\n"
        "torch.ones(1, device='cuda')\n"
        "lib = native.load()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    found = [lib.clusters_at_once(0, size) for size in (1, 2, 4)]\n"
        "    x = torch.ones(4, device='cuda') + 1\n"
        "graph.replay(); torch.cuda.synchronize()\n"
        "print(found, x.sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    lib = native.load()
    found = [lib.clusters_at_once(0, size) for size in (1, 2, 4)]
    assert done.stdout.strip() == f"{found} 8.0", done.stderr


def test_two_streams_share_nothing(kernel: Kernel) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    work = [mm_arguments(kernel, m) for m in (64, 48)]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, arguments in zip(streams, work):
            with torch.cuda.stream(stream):
                arguments.out.fill_(float("nan"))
                launch(kernel, arguments)
    torch.cuda.synchronize()
    for arguments in work:
        assert_exact(arguments.out, arguments)


def test_memory_stays_after_the_first_launches(kernel: Kernel) -> None:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    work = [mm_arguments(kernel, m) for m in (8, 64, 304)]
    torch.cuda.synchronize()

    def launch_all() -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                for arguments in work:
                    launch(kernel, arguments)

    launch_all()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(100):
        launch_all()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    for arguments in work:
        assert_exact(arguments.out, arguments)


RACE = """
import sys, threading
import torch
from nvgemm_runtime.launch.api import mm
kernel, devices = sys.argv[1], int(sys.argv[2])
m, n, k = map(int, sys.argv[5:])
torch.manual_seed(0)
work = []
for number in range(8):
    device = f"cuda:{number % devices}"
    a = (torch.rand(m + number, k, device=device) < 0.02).to(getattr(torch, sys.argv[3]))
    b = (torch.rand(n, k, device=device) < 0.02).to(getattr(torch, sys.argv[3])).T
    work.append((a, b, torch.full((m + number, n), float("nan"),
                                  dtype=getattr(torch, sys.argv[4]), device=device)))
for device in range(devices):
    torch.cuda.synchronize(device)
barrier = threading.Barrier(len(work))
failures = []
def run(a, b, out):
    stream = torch.cuda.Stream(out.device)
    barrier.wait()
    try:
        with torch.cuda.stream(stream):
            for _ in range(50):
                mm(a, b, out, kernel=kernel)
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=run, args=item) for item in work]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
for a, b, out in work:
    torch.cuda.synchronize(out.device)
    assert torch.equal(out.double(), a.double() @ b.double())
print("right")
"""


def race(kernel: Kernel, devices: int) -> None:
    problem = busy(kernel, 16)
    types = [
        str(torch_dtype(dtype)).removeprefix("torch.")
        for dtype in (kernel.signature.a, kernel.signature.out)
    ]
    given = [kernel.id, devices, *types, problem.m, problem.n, problem.k]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RACE, *map(str, given)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.strip() == "right", done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_threads_with_streams_of_their_own(kind: str) -> None:
    race(find_kernel(kind, "mm/tn/"), devices=1)


@two_gpus
@pytest.mark.parametrize("kind", KINDS)
def test_threads_on_two_gpus(kind: str) -> None:
    race(find_kernel(kind, "mm/tn/"), devices=2)


def test_a_launch_on_another_stream_than_torchs_is_refused(kernel: Kernel) -> None:
    import tvm_ffi

    arguments = mm_arguments(kernel)
    other = torch.cuda.Stream()
    with (
        tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), other.cuda_stream),
        pytest.raises(ValueError, match="its launch is not on torch's current stream"),
    ):
        # Of torch's own tensors, TVM-FFI would take torch's stream.
        native.load().launch(
            load_kernel(kernel.id).handle, *map(tvm_ffi.from_dlpack, arguments.operands())
        )


def test_what_generated_code_calls_is_right(kernel: Kernel) -> None:
    """Python code calls a function, C++ code an operator with the kernel's handle."""
    load_operators()
    arguments = mm_arguments(kernel)
    a, b, out = arguments.operands()

    def aten(*_: torch.Tensor, **__: object) -> torch.Tensor:
        raise AssertionError("ATen was called")

    call = gemm(aten, kernel.id, "the wheel split-k")
    for _ in range(3):
        poison_free_memory(kernel, arguments.problem)
        out.fill_(float("nan"))
        assert_exact(call(a, b, out=out), arguments)
    handle = torch.ops.nvgemm_aot.prepare(kernel.id, "the wheel split-k")
    out.fill_(float("nan"))
    assert torch.ops.nvgemm_aot.try_gemm(a, b, handle, out=out)
    assert_exact(out, arguments)


def test_compiled_programs_may_run_under_cuda_graphs(kernel: Kernel) -> None:
    """Inductor's own graphs: their pools hold no memory that it does not know."""
    load_operators()
    arguments = mm_arguments(kernel)
    operator = torch.ops.nvgemm_aot.mm

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return operator(a + 0, b, kernel.id) + operator(a + 0, b, kernel.id) * 0

    compiled = torch.compile(program, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(arguments.a, arguments.b).clone()
        assert_exact(result, arguments)
    torch._dynamo.reset()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_programs_get_no_kernel_that_depends_on_timing() -> None:
    loose = [kernel for kernel in SHARING if not kernel.is_deterministic]
    seen = set()
    for found in loose:
        arguments = exact_arguments(problem_of(found.signature, 16, 1024, LARGE_K, count=2))
        usual = explain(arguments.a, arguments.b, arguments.out.dtype)
        assert usual.match is not None
        seen |= {one.kernel.is_deterministic for one in usual.match.kernels}
        torch.use_deterministic_algorithms(True)
        try:
            strict = explain(arguments.a, arguments.b, arguments.out.dtype)
            assert strict.match is not None
            assert all(one.kernel.is_deterministic for one in strict.match.kernels)
            assert choose(*arguments.operands()).kernel.is_deterministic
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == {True, False}


@pytest.mark.usefixtures("deterministic")
def test_a_kernel_that_depends_on_timing_is_refused_by_name() -> None:
    named = find_kernel("any order", "mm/tn/")
    arguments = mm_arguments(named)
    with pytest.raises(RuntimeError, match="results depend on timing"):
        mm(*arguments.operands(), kernel=named.id)
    with pytest.raises(RuntimeError, match="results depend on timing"):
        mm(*arguments.operands(), kernel=load_kernel(named.id))


def test_the_driver_tells_how_many_clusters_run_at_once() -> None:
    lib = native.load()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    found = {size: lib.clusters_at_once(0, size) for size in (1, 2, 4, 8, 16)}
    assert found[1] == count
    for size, clusters in found.items():
        assert count // 2 // size < clusters <= count // size
    for profile in map(load_profile, profile_names()):
        if profile.driver_name != torch.cuda.get_device_name(0):
            continue
        for size, fact in profile.max_active_clusters.items():
            # Which multiprocessors are switched off differs from one GPU to another.
            if fact.basis == "measured":
                assert abs(lib.clusters_at_once(0, size) - fact.value) <= 1 + fact.value // 10


def test_kernels_are_told_and_are_right_with_clusters_of_two(
    installed: tuple[Bundle, Kernel],
) -> None:
    _, kernel = installed
    convention = parse_calling_convention(kernel.calling_convention)
    assert convention is not None
    if not convention.takes_clusters or kernel.design.cluster == (1, 1):
        pytest.skip("of kernels with clusters")
    step_m, _, _ = size_steps(kernel.signature, kernel.alignment_bytes)
    for m in (128, 3000):  # one wave, and several
        problem = problem_of(kernel.signature, -(-m // step_m) * step_m, 4096, 512, count=2)
        arguments = exact_arguments(problem)
        out = launch(kernel, arguments)
        if has_exact_results(kernel.signature):
            assert_exact(out, arguments)
        else:  # an activation with rounding
            assert_close(out, arguments)
