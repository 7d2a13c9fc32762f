"""What the documents say stays true."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import nvgemm_runtime
from documents import (
    MARKER,
    SECTIONS,
    as_built,
    code_blocks,
    commands,
    documents,
    exit_codes,
    packages,
    read,
    torch_names,
)
from nvgemm_aot.cli.main import main
from nvgemm_aot.verify.findings import Check
from nvgemm_runtime.bundle.calling_convention import MNKL, STREAM, WORKSPACE
from nvgemm_runtime.bundle.imported_symbols import NEWEST_RUN, OLDEST_RUN
from nvgemm_runtime.gemm.epilogues import ALL_EPILOGUES
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.target import CUDA_VERSIONS
from nvgemm_runtime.gemm.types import DType, ScaleRecipe
from nvgemm_runtime.inductor.autoload import SUPPORTED
from nvgemm_runtime.settings import VARIABLES
from repository import ROOT

SOURCES = [*ROOT.glob("runtime/nvgemm_runtime/**/*.py"), *ROOT.glob("aot/nvgemm_aot/**/*.py")]
PACKAGES = {"nvgemm_runtime": ROOT / "runtime", "nvgemm_aot": ROOT / "aot"}
each_document = pytest.mark.parametrize(
    "document", list(documents()), ids=lambda path: str(path.relative_to(ROOT))
)


def test_ci_runs_the_readme_test_command_and_builds_the_site() -> None:
    (command,) = re.findall(r"^python3 -m venv .*/pytest .*$", read("README.md"), re.MULTILINE)
    install, _, tests = command.rpartition(" && ")
    ci = read(".ci/run").splitlines()
    assert ci.index(install) < ci.index(tests)
    assert any("mkdocs build --strict" in line for line in ci)


def test_ci_runs_all_that_the_default_leaves_out() -> None:
    assert '-m "not slow"' in read("pyproject.toml")
    assert ".venv/bin/pytest -m slow " in read(".ci/run")


def test_ci_walks_the_path_of_the_readme() -> None:
    assert ".ci/walk .venv" in read(".ci/run").splitlines()
    walked, readme = read(".ci/walk"), read("README.md")
    assert "nvgemm-aot build manifests/quickstart.yaml --wheel\n" in readme
    assert '/bin/nvgemm-aot" build "$walk/few.yaml" --wheel' in walked
    for wheel in ("dist/nvgemm_aot-*.whl", "dist/nvgemm_kernels_"):
        assert f" {wheel}" in readme
        assert wheel in walked


@pytest.mark.parametrize("document", ["docs/guide/quickstart.md", "docs/guide/installing.md"])
def test_guides_follow_the_path_of_the_readme(document: str) -> None:
    path = [line for line in read("README.md").splitlines() if "nvgemm_kernels_quickstart-" in line]
    path += re.findall("^python3 -m venv .*--wheel$", read("README.md"), re.MULTILINE)
    assert len(path) == 2
    assert {*path} <= {*read(document).splitlines()}


def test_the_quickstart_shows_what_its_build_prints(tmp_path: Path) -> None:
    command = ["build", str(ROOT / "manifests/quickstart.yaml"), "--dry-run"]
    command += ["--cache-dir", str(tmp_path)]
    plan = CliRunner().invoke(main, command).stdout
    page = read("docs/guide/quickstart.md")
    kernels = re.findall(r"^(\S+): \d+ problems, (\d+) unique kernels", plan, re.MULTILINE)
    assert len(kernels) == 2
    for target, count in kernels:
        assert f"dist/quickstart-{target}.nvgemm: written, {count} kernels for " in page
    ranked = [line for line in plan.splitlines() if "problems ranked by" in line]
    assert len(ranked) == 3
    assert {*ranked} <= {*page.splitlines()}


@each_document
def test_documents_install_nvgemm_aot_by_file(document: Path) -> None:
    """By name, pip would ask a registry, which may have somebody else's package."""
    if document.name == "releasing.md":
        return  # it speaks of what is published
    for command in re.findall(r"pip install [^`&\n]*", document.read_text("utf-8")):
        if "--no-index" not in command:
            by_name = re.findall(
                r"(?<![\w/])nvgemm[-_](?:aot|kernels)[^ `]*", command.partition("#")[0]
            )
            assert not [one for one in by_name if ".whl" not in one], command


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 100


def test_every_exit_code_is_in_the_reference() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", SECTIONS["exit-codes"](), re.M)}
    assigned = {
        int(code)
        for source in SOURCES
        for code in re.findall(r"^\s+exit_code(?::.*)? = (\d+)$", source.read_text("utf-8"), re.M)
    }
    base = 3  # of NvgemmError, which nothing raises
    assert len(assigned) > 15
    assert assigned - {base} <= listed
    assert listed - assigned == {0, 1, 2, 130}


def test_each_error_has_an_exit_code_and_a_meaning_of_its_own() -> None:
    codes = [kind.exit_code for kind in exit_codes.kinds()]
    meanings = [meaning for _, meaning in exit_codes.raised().values()]
    assert len(set(codes)) == len(codes)
    assert len(set(meanings)) == len(codes)
    assert all(meanings)


def test_every_variable_that_is_read_is_in_the_reference() -> None:
    used = {
        name
        for source in SOURCES
        for name in re.findall(r'"(NVGEMM_AOT(?:_[A-Z]+)*)"', source.read_text("utf-8"))
    }
    assert "NVGEMM_AOT_EXPLAIN" in used
    assert used == set(VARIABLES)
    page = SECTIONS["environment"]()
    for name, text in VARIABLES.items():
        assert f"| `{name}` | {text} |" in page


@each_document
def test_commands_and_options_in_documents_exist(document: Path) -> None:
    options = {
        context.command_path: {
            name for parameter in context.command.params for name in parameter.opts
        }
        for context in commands.contexts()
    }
    text = document.read_text("utf-8")
    quoted = [*re.findall(r"`(nvgemm-aot [^`]+)`", text)]
    quoted += [
        line
        for block in code_blocks(text, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("nvgemm-aot ")
    ]
    for line in quoted:
        words = line.partition("#")[0].partition(" -- ")[0].split()
        if not re.fullmatch(r"[a-z-]+", words[1]) or words[1].startswith("-"):
            continue  # options of the group, or a placeholder
        path = " ".join(words[:2])
        if len(words) > 2 and " ".join(words[:3]) in options:
            path = " ".join(words[:3])
        assert path in options, line
        if any(path != other and other.startswith(f"{path} ") for other in options):
            continue  # of a group's commands, together
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options[path], line


def test_format_document_lists_exactly_the_rules_that_are_checked() -> None:
    documented = set(
        re.findall(r"^\| `([a-z-]+)` \|", read("FORMAT.md").split("## Rules")[1], re.M)
    )
    source = "".join(path.read_text("utf-8") for path in ROOT.glob("runtime/*/bundle/**/*.py"))
    checked = set(re.findall(r'_?fail\(\s*"([a-z-]+)"', source))
    assert documented == checked


def test_verify_document_lists_exactly_the_checks_that_are_made() -> None:
    rows = re.findall(r"^\| (`[a-z`, -]+`) \|", read("docs/explanation/verify.md"), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(documented) == sorted(check.value for check in Check)


def test_format_document_lists_the_parameters_and_types_that_there_are() -> None:
    text = read("FORMAT.md")
    for member in (*Role, *DType, *Op, *ScaleRecipe):
        assert f"`{member.value}`" in text, member
    for epilogue in ALL_EPILOGUES:
        assert f"`{epilogue.name}`" in text, epilogue
    for parameter in (MNKL, WORKSPACE, STREAM):
        assert f"| `{parameter}` |" in text, parameter


def test_contributing_gives_a_reason_for_every_dependency() -> None:
    declared = set(re.findall(r'^    "([a-z0-9-]+)[\[><=]', read("pyproject.toml"), re.MULTILINE))
    section = read("CONTRIBUTING.md").split("## Dependencies")[1]
    assert len(declared) > 15
    assert not [name for name in declared if name not in section]


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]*(?:#[^)]+)?)\)", document.read_text("utf-8")):
        path, _, section = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.+)$", as_built(target), re.MULTILINE)
            assert section in map(anchor, headings), link


def anchor(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each_document
def test_modules_and_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    for name in re.findall(r"(?<!ops\.)\b(nvgemm_(?:aot|runtime)(?:\.[A-Za-z_]\w*)+)", text):
        assert names_something(name), name
    for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    folders = "aot|runtime|tests|benchmarks|docs|manifests|wheels"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.(?:cpp|h))`", text):
        assert any((ROOT / "runtime/csrc").rglob(name)), name


def names_something(name: str) -> bool:
    """Whether a dotted name is a module of the source tree, or a name in one."""
    package, *parts = name.split(".")
    path = PACKAGES[package] / package
    for position, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
        elif (path / f"{part}.py").is_file():
            path = path / f"{part}.py"
        else:
            inside = path if path.is_file() else path / "__init__.py"
            return position == len(parts) - 1 and (
                part in nvgemm_runtime.__all__ or re.search(rf"\b{part}\b", read_text(inside))
            )  # fmt: skip
    return True


def read_text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def test_names_of_nothing_are_noticed() -> None:
    assert names_something("nvgemm_runtime.inductor")
    assert names_something("nvgemm_runtime.mm")
    assert not names_something("nvgemm_runtime.inductors")
    assert not names_something("nvgemm_aot.manifest.no_such_module")


def test_each_generated_part_is_in_a_page_and_each_page_in_the_navigation() -> None:
    asked = {
        name
        for page in ROOT.glob("docs/**/*.md")
        for kind, name in MARKER.findall(page.read_text("utf-8"))
        if kind == "generated"
    }
    assert asked == set(SECTIONS)
    navigation = read("mkdocs.yml").split("\nnav:")[1]
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", navigation))


def test_layers_show_every_package() -> None:
    for package, folder in PACKAGES.items():
        shown = {name for layer in packages.read_layers(ROOT, package) for name in layer}
        there = {path.parent.name for path in (folder / package).glob("*/__init__.py")}
        assert there <= shown
        page = SECTIONS["builder-layers" if package == "nvgemm_aot" else "runtime-layers"]()
        assert not re.search(r"\|\s*\|\s*$", page, re.MULTILINE), "a package without a purpose"


def test_private_names_of_torch_are_found_in_code_and_in_strings(tmp_path: Path) -> None:
    module = tmp_path / "aot/nvgemm_aot/one.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import torch\nfrom torch._inductor import ir\n"
        'torch._C._nn.thing\ntorch.mm\nLATER = "torch._dynamo.config"\n'
    )
    assert torch_names.by_module(tmp_path) == {
        "one.py": {"torch._inductor.ir", "torch._C._nn.thing", "torch._dynamo.config"}
    }


def test_this_torch_has_each_private_name() -> None:
    """Run with a new release of torch, this names what it has lost."""
    names = {name for module in torch_names.by_module(ROOT).values() for name in module}
    assert len(names) > 40
    assert sorted(name for name in names if not _is_in_torch(name)) == []
    assert not _is_in_torch("torch._inductor.ir.NoSuchNode")
    assert not _is_in_torch("torch._no_such_module.ir")


def _is_in_torch(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute in one."""
    first, *others = name.split(".")
    found, path = importlib.import_module(first), first
    for part in others:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)  # a submodule that nothing has imported yet
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_one_range_of_torch_is_said_everywhere() -> None:
    (first_major, first), (last_major, last) = SUPPORTED
    assert f'"torch>={first_major}.{first},<{last_major}.{last + 1}"' in read("pyproject.toml")
    said = f"{first_major}.{first}\N{EN DASH}{last_major}.{last}"
    for document in ("README.md", "CONTRIBUTING.md", "docs/reference/support.md"):
        assert said in read(document), document


def test_each_supported_release_of_torch_is_said_to_have_been_run() -> None:
    (major, first), (_, last) = SUPPORTED
    rows = re.findall(rf"^\| {major}\.(\d+)[. ]", read("docs/develop/torch.md"), re.MULTILINE)
    assert [int(minor) for minor in rows] == list(range(first, last + 1))


def test_one_range_of_each_library_is_said_everywhere() -> None:
    project, installing = read("pyproject.toml"), read("docs/guide/installing.md")
    major, minor = NEWEST_RUN
    for cuda in CUDA_VERSIONS:
        assert f'"nvidia-cutlass-dsl-libs-{cuda}>={OLDEST_RUN},<{major}.{minor + 1}"' in project
    assert f"| from {OLDEST_RUN}, below {major}.{minor + 1} |" in installing
    ((ffi,),) = [re.findall(r'^    "apache-tvm-ffi>=(.*),<0.2",$', project, re.MULTILINE)]
    assert f'"apache-tvm-ffi=={ffi}"]' in project, "the native part is built with the oldest"
    assert f"| from {ffi}, below 0.2 |" in installing
    for source in (
        "runtime/nvgemm_runtime/launch/loading/native.py",
        "runtime/csrc/CMakeLists.txt",
    ):
        assert f"'apache-tvm-ffi>={ffi},<0.2'" in read(source)


def test_changelog_names_the_current_format_version() -> None:
    from nvgemm_runtime.bundle.format import FORMAT_VERSION, PAGED_VERSION

    table = read("CHANGELOG.md").split("## Bundle format")[1]
    assert f"| {FORMAT_VERSION} |" in table
    assert f"| {PAGED_VERSION} |" in table
    title = f"The bundle format, versions {FORMAT_VERSION} and {PAGED_VERSION}"
    assert title in read("FORMAT.md")
