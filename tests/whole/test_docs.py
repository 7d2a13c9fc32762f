"""What the documents say stays true."""

from __future__ import annotations

import re

from nvgemm_aot.verify.findings import Check
from nvgemm_runtime import errors
from nvgemm_runtime.bundle.calling_convention import MNKL, STREAM, WORKSPACE
from nvgemm_runtime.bundle.imported_symbols import FIRST_RELEASE, NEWEST_RUN
from nvgemm_runtime.errors import NvgemmError
from nvgemm_runtime.gemm.element_types import DType
from nvgemm_runtime.gemm.epilogue import Epilogue
from nvgemm_runtime.gemm.problem import Op
from nvgemm_runtime.gemm.roles import Role
from nvgemm_runtime.gemm.scales import ScaleRecipe
from nvgemm_runtime.inductor.autoload import SUPPORTED
from nvgemm_runtime.matching.refusals import version_numbers
from repository import ROOT


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"^python3 -m venv .*/pytest .*$", read("README.md"), re.MULTILINE)
    assert len(commands) == 1
    assert commands[0] in read(".ci/run").splitlines()


def test_ci_runs_all_that_the_default_leaves_out() -> None:
    assert '-m "not slow"' in read("pyproject.toml")
    assert ".venv/bin/pytest -m slow " in read(".ci/run")


def test_readme_lists_every_exit_code() -> None:
    section = read("README.md").split("## Exit codes")[1].split("## ")[0]
    listed = {
        int(code)
        for row in re.findall(r"^\| ([0-9, ]+) \|", section, re.MULTILINE)
        for code in row.split(",")
    }
    raised = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, NvgemmError) and kind is not NvgemmError
    }
    never_reach_the_command = {
        errors.TargetError,  # the manifest says it, with its position
        errors.LinkError,  # a kernel that does not link is one that does not compile
        errors.NoKernelError,  # nothing is loaded yet
        errors.DriverError,
        errors.RequiredError,  # raised by torch.compile, in the user's program
        errors.SettingError,
    }
    assert raised - listed == {kind.exit_code for kind in never_reach_the_command}


def test_format_document_lists_exactly_the_rules_that_are_checked() -> None:
    documented = set(
        re.findall(r"^\| `([a-z-]+)` \|", read("FORMAT.md").split("## Rules")[1], re.M)
    )
    source = "".join(
        read(f"runtime/nvgemm_runtime/{name}.py")
        for name in ("bundle/reader", "bundle/decode", "bundle/header_rules")
    )
    checked = set(re.findall(r'_?fail\(\s*"([a-z-]+)"', source))
    assert documented == checked


def test_verify_document_lists_exactly_the_checks_that_are_made() -> None:
    rows = re.findall(r"^\| (`[a-z`, -]+`) \|", read("docs/verify.md"), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(documented) == sorted(check.value for check in Check)


def test_format_document_lists_the_parameters_and_types_that_there_are() -> None:
    text = read("FORMAT.md")
    for value in (*Role, *DType, *Op, *ScaleRecipe, *Epilogue):
        assert f"`{value.value}`" in text, value
    for parameter in (MNKL, WORKSPACE, STREAM):
        assert f"| `{parameter}` |" in text, parameter


def test_contributing_gives_a_reason_for_every_dependency() -> None:
    declared = set(re.findall(r'^    "([a-z0-9-]+)[\[><=]', read("pyproject.toml"), re.MULTILINE))
    section = read("CONTRIBUTING.md").split("## Dependencies")[1]
    assert len(declared) > 15
    assert not [name for name in declared if name not in section]


def test_links_between_documents_lead_somewhere() -> None:
    documents = [
        *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "manifests/README.md"
    ]  # fmt: skip
    for document in documents:
        for link in re.findall(r"\]\(([^)#:]*(?:#[^)]+)?)\)", document.read_text("utf-8")):
            path, _, section = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), (document.name, link)
            if section:
                headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
                assert section in map(anchor, headings), (document.name, link)


def anchor(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_variable_that_is_read_is_documented() -> None:
    sources = [*ROOT.glob("runtime/nvgemm_runtime/**/*.py"), *ROOT.glob("aot/nvgemm_aot/**/*.py")]
    variables = {
        name
        for source in sources
        for name in re.findall(r'"(NVGEMM_[A-Z_]+)"', source.read_text("utf-8"))
    }
    assert "NVGEMM_AOT_EXPLAIN" in variables
    documents = "".join(read(f"docs/{path.name}") for path in (ROOT / "docs").glob("*.md"))
    documents += read("README.md")
    assert {name for name in variables if not re.search(rf"`{name}[`=]", documents)} == set()


def test_one_range_of_torch_is_said_everywhere() -> None:
    (first_major, first), (last_major, last) = SUPPORTED
    assert f'"torch>={first_major}.{first},<{last_major}.{last + 1}"' in read("pyproject.toml")
    said = f"{first_major}.{first}\N{EN DASH}{last_major}.{last}"
    for document in ("README.md", "CONTRIBUTING.md", "docs/torch-compile.md"):
        assert said in read(document), document


def test_one_range_of_each_library_is_said_everywhere() -> None:
    project, installing = read("pyproject.toml"), read("docs/installing.md")
    major, minor = NEWEST_RUN
    oldest = max(FIRST_RELEASE.values(), key=version_numbers)
    assert f'"nvidia-cutlass-dsl-libs-cu13>={oldest},<{major}.{minor + 1}"' in project
    assert f"| from {oldest}, below {major}.{minor + 1} |" in installing
    ((ffi,),) = [re.findall(r'^    "apache-tvm-ffi>=(.*),<0.2",$', project, re.MULTILINE)]
    assert f'"apache-tvm-ffi=={ffi}"]' in project, "the native part is built with the oldest"
    assert f"| from {ffi}, below 0.2 |" in installing
    for source in ("runtime/nvgemm_runtime/launch/native.py", "runtime/csrc/CMakeLists.txt"):
        assert f"'apache-tvm-ffi>={ffi},<0.2'" in read(source)


def test_changelog_names_the_current_format_version() -> None:
    from nvgemm_runtime.bundle.format import FORMAT_VERSION

    table = read("CHANGELOG.md").split("## Bundle format")[1]
    assert f"| {FORMAT_VERSION} |" in table
    assert f"The bundle format, version {FORMAT_VERSION}" in read("FORMAT.md")
