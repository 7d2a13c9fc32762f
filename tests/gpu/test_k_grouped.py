"""Groups along k, the gradient of experts' weights: any distribution, and ends that are wrong.

Needs the wheel of grouped.yaml, whose kernels `test_kernels` looks at as at all others.
"""

from __future__ import annotations

import pytest
import torch
from edges import problem_of
from gemm_arguments import Arguments, exact_arguments, poisoned, random_arguments
from gemm_reference import assert_exact
from installed import installed_kernels, launch

import nvgemm_runtime
from nvgemm_runtime.bundle.format import Kernel
from nvgemm_runtime.gemm.epilogues import GateForm
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import Role

DEVICE = "cuda"
KERNELS = [kernel for _, kernel in installed_kernels() if kernel.signature.op is Op.K_GROUPED_MM]

each = pytest.mark.parametrize(
    "kernel", KERNELS, ids=[f"{one.id[:12]}-{one.signature.key}" for one in KERNELS]
)

COUNTS: dict[str, tuple[int, ...]] = {
    "one k each": (1,) * 40,
    "all in the first": (777, 0, 0, 0, 0),
    "all in the last": (0, 0, 0, 0, 777),
    "all in the middle": (0, 0, 257, 0, 0),
    "odd": (1, 3, 127, 129, 0, 255, 257, 5, 63, 65),
    "whole tiles": (64, 128, 256, 0, 192, 384),
    "one group": (300,),
    "more groups than multiprocessors": tuple((7 * i) % 11 for i in range(200)),
    "some k in no group": (100, 0, 28),
}
"""How many k each group has."""

UNGROUPED = {"some k in no group": 72}
"""k behind the last group, which nothing adds."""


def arguments_for(kernel: Kernel, name: str) -> Arguments:
    counts = COUNTS[name]
    k = sum(counts) + UNGROUPED.get(name, 0)
    arguments = exact_arguments(problem_of(kernel.signature, 328, 200, k, count=len(counts)))
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    arguments.tensors[Role.OFFSETS] = ends.to(DEVICE)
    return arguments


@each
@pytest.mark.parametrize("name", COUNTS)
def test_any_distribution_of_k_is_exact(kernel: Kernel, name: str) -> None:
    arguments = arguments_for(kernel, name)
    out = launch(kernel, arguments)
    assert_exact(out, arguments)
    for group, count in enumerate(COUNTS[name]):
        assert count or (out[group] == 0).all()


@each
def test_nan_stays_in_its_own_group(kernel: Kernel) -> None:
    """Tiles of k reach into the next group, whose terms must not count."""
    arguments = arguments_for(kernel, "odd")
    clean = launch(kernel, arguments).clone()
    begin = sum(COUNTS["odd"][:3])
    arguments.a[:, begin : begin + 129] = float("nan")
    out = launch(kernel, arguments)
    assert out[3].isnan().all()
    others = [group for group in range(len(COUNTS["odd"])) if group != 3]
    assert torch.equal(out[others], clean[others])


WRONG = {
    "falling": (100, 3, 70, 128),
    "all falling": (128, 90, 60, 0),
    "past the end": (10, 64, 4000, 1_000_000_000),
    "all past the end": (2**31 - 1,) * 4,
    "negative": (-5, 20, -(2**31), 128),
}


@each
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ends_write_nothing_outside_the_result(kernel: Kernel, name: str) -> None:
    """What the result holds is undefined; run it under compute-sanitizer for what is read."""
    arguments = exact_arguments(problem_of(kernel.signature, 328, 200, 128, count=4))
    arguments.tensors[Role.OFFSETS] = torch.tensor(WRONG[name], dtype=torch.int32, device=DEVICE)
    frame = poisoned((4 + 2, 328, 200), kernel.signature.out)
    before = frame.clone()
    arguments.tensors[Role.OUT] = frame[1:-1]
    launch(kernel, arguments)
    torch.cuda.synchronize()
    frame[1:-1] = before[1:-1]
    assert torch.equal(frame.view(torch.uint8), before.view(torch.uint8))


READERS = [
    kernel
    for _, kernel in installed_kernels()
    if kernel.signature.form is GateForm.GRADIENT and "pingpong" in kernel.operator
]
"""They read a matrix at the end of each tile, and let the next kernel begin when half of each
thread block has no more tiles: with a tile for each, at once."""


@each
def test_zeros_of_groups_without_k_wait_for_the_kernel_ahead(kernel: Kernel) -> None:
    """In memory that this reads, as a result may have that was an operand, freed behind a launch.

    In a captured graph a kernel may begin before the one ahead of it on the stream has ended.
    """
    ahead = random_arguments(problem_of(READERS[0].signature, 1024, 1024, 4096, count=4))
    wanted = launch(READERS[0], ahead).clone()
    kept = ahead.tensors[Role.ADDEND].clone()
    behind = random_arguments(problem_of(kernel.signature, 1024, 1024, 64, count=64))
    ends = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    ends[-1] = 64
    behind.tensors[Role.OFFSETS] = ends
    memory = behind.out
    taken = memory.view(torch.uint8).flatten()[: kept.nbytes].view(kept.dtype).view(kept.shape)
    ahead.tensors[Role.ADDEND] = taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken.copy_(kept)
        launch(READERS[0], ahead)
        launch(kernel, behind)
    for _ in range(20):
        ahead.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(ahead.out, wanted)
    assert not memory[:-1].any()


def test_torch_computes_the_same() -> None:
    """As the backward of `torch._grouped_mm` calls it."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 1, 333, 0, 400, 90, 200, 0])
    ends = counts.cumsum(0).to(torch.int32).to(DEVICE)
    rows = int(counts.sum())
    gradient = torch.randn(rows, 512, device=DEVICE, dtype=torch.bfloat16)
    tokens = torch.randn(rows, 768, device=DEVICE, dtype=torch.bfloat16)
    made = nvgemm_runtime.k_grouped_mm(gradient.mT, tokens, ends)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        exact = gradient[begin:end].mT.float() @ tokens[begin:end].float()
        torch.testing.assert_close(made[group].float(), exact, rtol=2**-7, atol=0.5)
        begin = end
    theirs = torch._grouped_mm(gradient.mT, tokens, offs=ends)
    torch.testing.assert_close(made, theirs, rtol=2**-6, atol=0.5)
