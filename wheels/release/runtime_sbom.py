"""The software bill of materials of the runtime's wheel: what its native parts contain.

Python code in the wheel is this project's own; other packages are dependencies, which the wheel's
metadata states. Kernel wheels have an SBOM of their own, which ``nvgemm-aot wheel`` writes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from packageurl import PackageURL

from steps import stop

LLVM_LIBRARIES = ("libc++", "libc++abi", "libunwind")
"""What zig's compiler links into a C++ library: parts of LLVM, in the compiler's version."""


def render(*, version: str, native_parts: Mapping[str, bytes], compiler: str, tvm_ffi: str) -> str:
    """A CycloneDX 1.6 document; equal arguments give equal text.

    It has no time. Its serial number is made from the rest of it.

    Args:
        version: The project's.
        native_parts: Bytes of the native parts, by their paths in the wheel.
        compiler: What zig's compiler prints for ``--version``.
        tvm_ffi: Requirement of the release whose headers were used, ``apache-tvm-ffi==VERSION``.
    """
    root = _package("nvgemm-aot", version, "Apache-2.0")
    files = [_file(path, content) for path, content in native_parts.items()]
    libraries = [_llvm_library(name, llvm_version(compiler)) for name in LLVM_LIBRARIES]
    name, _, release = tvm_ffi.partition("==")
    tools = [
        _package(name, release, "Apache-2.0", ComponentScope.EXCLUDED),
        _package("ziglang", installed_version("ziglang"), "MIT", ComponentScope.EXCLUDED),
    ]
    bom = Bom(components=[*files, *libraries, *tools])
    bom.metadata.component = root
    bom.register_dependency(root, [*files, *tools])
    for file in files:
        bom.register_dependency(file, libraries)
    # The library would fill both in, differently each time; CycloneDX requires neither.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.serial_number = None  # type: ignore[assignment]
    bom.serial_number = uuid5(NAMESPACE_URL, _text(bom))
    from cyclonedx.validation.json import JsonStrictValidator  # its grammars take two seconds

    text = _text(bom)
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        stop(f"the SBOM does not keep CycloneDX's schema: {error}")
    return text


def llvm_version(compiler: str) -> str:
    """The version of LLVM, from what a compiler prints for ``--version``."""
    found = re.match(r"clang version (\d+\.\d+\.\d+)", compiler)
    if found is None:
        stop(f"zig c++ --version says {compiler[:80]!r}; it must begin with 'clang version'")
    return found[1]


def _text(bom: Bom) -> str:
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _file(path: str, content: bytes) -> Component:
    digest = hashlib.sha256(content).hexdigest()
    return Component(
        type=ComponentType.FILE,
        name=path,
        bom_ref=f"file:{path}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )


def _package(
    name: str, version: str, licence: str, scope: ComponentScope | None = None
) -> Component:
    """A distribution of PyPI; one of scope ``excluded`` shaped the wheel and is not in it."""
    purl = PackageURL(type="pypi", name=name, version=version)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        scope=scope,
        purl=purl,
        bom_ref=str(purl),
        licenses=[DisjunctiveLicense(id=licence)],
    )


def _llvm_library(name: str, version: str) -> Component:
    purl = PackageURL(type="generic", namespace="llvm", name=name, version=version)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        scope=ComponentScope.REQUIRED,
        purl=purl,
        bom_ref=str(purl),
        licenses=[LicenseExpression("Apache-2.0 WITH LLVM-exception")],
    )
