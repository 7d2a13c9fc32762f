"""Lets a program that wants a GPU run on fake tensors: no GPU, no memory, no numbers.

What is asked for on ``cuda`` is made on ``cpu``: torch without CUDA has no streams for ``cuda``
tensors, and autograd ends the process for want of them. To a GEMM it makes no difference.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_CUDA = re.compile(r"cuda(:[0-9]+)?")


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Make every tensor of this thread a fake one, on the CPU. torch.compile does not compile.

    Only for a process of its own: functions of torch are replaced, and some are not put back.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _let_parameters_swap(mode)
    _let_autocast_be_on_the_cpu()
    torch.cuda.synchronize = lambda device=None: None
    torch.compiler.set_stance("force_eager")
    with mode, _CudaIsCpu():
        yield


class _CudaIsCpu(TorchFunctionMode):  # type: ignore[misc]
    """Takes ``cuda`` for ``cpu`` in the arguments of torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func in (torch.Tensor.to, torch._C._nn._parse_to):
            # A number alone is a device, too.
            args = ["cpu" if type(value) is int else value for value in args]
        if type(named.get("device")) is int or (
            named.get("device") is None and func in _device_constructors()
        ):
            named["device"] = "cpu"
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _let_parameters_swap(mode: FakeTensorMode) -> None:
    """Let modules change their type: the mode's memory of a parameter keeps torch from it."""
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def forget_and_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    torch.utils.swap_tensors = forget_and_swap


def _let_autocast_be_on_the_cpu() -> None:
    autocast = torch.amp.autocast_mode.autocast
    start = autocast.__init__

    @functools.wraps(start)
    def start_on_cpu(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *rest: Any, **named: Any
    ) -> None:
        if _CUDA.fullmatch(device_type):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        start(self, device_type, dtype, *rest, **named)

    autocast.__init__ = start_on_cpu
