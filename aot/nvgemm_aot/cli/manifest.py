"""``nvgemm-aot manifest`` and ``nvgemm-aot schema``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvgemm_runtime.gemm.problem import MAX_EXTENT, DType
from nvgemm_runtime.gemm.target import (
    CUDA_VERSIONS,
    DEFAULT_ARCHITECTURE,
    PLATFORMS,
    Target,
    TargetName,
)

from .terminal.printing import count_text
from .terminal.shared_options import ANY_PATH, ARCHITECTURE_NAMES, TargetNameParam

if TYPE_CHECKING:
    from ..manifest.config_manifest import ConfigManifest


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Parses positive integers between commas; returns them sorted and without duplicates."""
    numbers = set()
    for part in value.split(","):
        number = int(part) if re.fullmatch(r" *[0-9]{1,10} *", part) else 0
        if not 1 <= number <= MAX_EXTENT:
            raise click.BadParameter(
                f"found {part!r}; allowed: integers in 1..{MAX_EXTENT}, separated by commas"
            )
        numbers.add(number)
    return tuple(sorted(numbers))


def _targets(
    ctx: click.Context, param: click.Parameter, value: Sequence[TargetName]
) -> tuple[Target, ...]:
    """Returns the named targets without duplicates; platform and CUDA have their defaults."""
    return tuple(dict.fromkeys(name.resolve(platform=None, cuda=None) for name in value))


@click.group()
def manifest() -> None:
    """Make manifests."""


@manifest.command(name="from-config")
@click.argument("config", type=ANY_PATH)
@click.option(
    "--tokens",
    metavar="N,N,...",
    required=True,
    callback=_numbers,
    help="Tokens of a forward pass, as 1,16,256,4096.",
)
@click.option(
    "--inputs",
    metavar="N,N,...",
    default="1",
    show_default=True,
    callback=_numbers,
    help="Sequences, images or clips of a forward pass, for layers whose rows they set.",
)
@click.option(
    "--tp",
    metavar="N,N,...",
    default="1",
    show_default=True,
    callback=_numbers,
    help="GPUs that tensor parallelism divides the model over, as 1,8.",
)
@click.option(
    "--ep",
    metavar="N,N,...",
    default="1",
    show_default=True,
    callback=_numbers,
    help="GPUs that expert parallelism divides the experts among, as 1,8.",
)
@click.option(
    "--training",
    is_flag=True,
    help="Also declare backward products: gradients of inputs and weights.",
)
@click.option(
    "--experts",
    type=click.Choice(["transformers", "torchtitan"]),
    multiple=True,
    default=["transformers"],
    show_default=True,
    help="Library whose expert weights to declare; may be repeated.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice([DType.BF16.value, DType.FP16.value]),
    multiple=True,
    default=[DType.BF16.value],
    show_default=True,
    help="Element type; may be repeated.",
)
@click.option(
    "--target",
    "targets",
    type=TargetNameParam(),
    multiple=True,
    default=[DEFAULT_ARCHITECTURE],
    show_default=True,
    callback=_targets,
    help=f"Target to build for: one of {ARCHITECTURE_NAMES}, for {PLATFORMS[0]} and "
    f"{CUDA_VERSIONS[0]} unless named, as in sm_90a-linux_aarch64-cu12; may be repeated.",
)
@click.option("--separate", is_flag=True, help="Separate q, k, v and gate, up: the default.")
@click.option("--fused", is_flag=True, help="Fused, as in serving engines; with --separate, both.")
@click.option(
    "--gated",
    is_flag=True,
    help="Also declare products with a fused gate, from provider quack.",
)
@click.option("--name", help="Name of the manifest; default the model's directory's, or CONFIG's.")
@click.option("-o", "--out", type=ANY_PATH, help="File to write; default is to print.")
def from_config(
    config: Path,
    tokens: tuple[int, ...],
    inputs: tuple[int, ...],
    tp: tuple[int, ...],
    ep: tuple[int, ...],
    training: bool,
    experts: tuple[str, ...],
    dtypes: tuple[str, ...],
    targets: tuple[Target, ...],
    separate: bool,
    fused: bool,
    gated: bool,
    name: str | None,
    out: Path | None,
) -> None:
    """Declare every GEMM of a model, from its Hugging Face CONFIG.

    CONFIG is a model's config.json, or its directory. llama, qwen3, qwen3_moe, mixtral, deepseek_v3
    and gpt_oss are read from it alone; any other model that transformers has is built and run under
    fake tensors, without weights, GPU or network. An existing -o file is replaced if it is
    unchanged since this command wrote it.
    """
    from ..manifest.config_manifest import ManifestOptions
    from ..manifest.config_yaml import manifest_yaml
    from ..manifest.from_config import make_manifest
    from ..manifest.models.expert_weights import ExpertWeights
    from ..manifest.seal import check_replaceable, seal
    from ..storage.files import write_atomic

    options = ManifestOptions(
        tokens=tokens,
        inputs=inputs,
        ranks=tp,
        expert_ranks=ep,
        experts=tuple(dict.fromkeys(map(ExpertWeights, experts))),
        dtypes=tuple(sorted(set(map(DType, dtypes)))),
        targets=targets,
        separate=separate or not fused,
        fused=fused,
        gated=gated,
        training=training,
    )
    if out is not None:
        check_replaceable(out)
    result = make_manifest(config, options, name=name)
    text = seal(manifest_yaml(result))
    if out is None:
        click.echo(text, nl=False)
    else:
        write_atomic(out, text.encode())
        click.echo(f"{out}: written, {count_text(result.problems, 'problem')}")
    for line in _omissions(result):
        click.echo(f"nvgemm-aot: {line}", err=True)


def _omissions(result: ConfigManifest) -> Iterator[str]:
    """Yields a warning for each group of GEMMs that the manifest leaves out, by reason."""
    for remark in result.model.remarks:
        yield f"warning: {remark}; its GEMMs are left out"
    left_out = result.left_out_calls
    if not left_out:
        return
    total, calls = result.forward_calls, left_out.total()
    lead = "warning: most GEMMs are left out: " if 2 * calls > total else ""
    yield (
        f"{lead}{calls} of {total} GEMMs of a forward pass are not declared; the file's end lists "
        "them"
    )
    for reason, count in left_out.most_common(_MOST_REASONS):
        yield f"  {count}: {reason}"
    if len(left_out) > _MOST_REASONS:
        yield f"  {sum(sorted(left_out.values())[:-_MOST_REASONS])}: other reasons"


_MOST_REASONS = 5
"""Most reasons that a command prints; the manifest's end has all."""


@click.command()
def schema() -> None:
    """Print the JSON Schema of manifests, for editors."""
    from ..manifest.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
