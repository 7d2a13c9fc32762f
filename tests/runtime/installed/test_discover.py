from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvgemm_runtime.installed.discover import BundleFile, find_bundles, find_wheel_bundles

METADATA = "Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site directory that is all of ``sys.path``."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.setattr(sys, "path", [str(directory)])
    return directory


def install(
    site: Path,
    name: str = "nvgemm-kernels-x",
    *,
    value: str | None = None,
    files: tuple[str, ...] = ("sm_90a.nvgemm",),
    metadata: str = METADATA,
) -> Path:
    """Lay out an installed kernel wheel; its package fails when it is imported."""
    package = name.replace("-", "_")
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / package).mkdir()
    paths = [f"{package}/{file}" for file in ("__init__.py", *files)]
    for path in paths:
        (site / path).write_text("raise RuntimeError('imported')")
    (info / "METADATA").write_text(metadata.format(name=name))
    (info / "entry_points.txt").write_text(
        f"[nvgemm_aot.bundles]\n{name} = {package if value is None else value}\n"
    )
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in paths))
    return info


def test_finds_nothing_where_nothing_is_installed(site: Path) -> None:
    assert find_wheel_bundles() == ()


def test_finds_bundles_in_order_without_importing_their_package(site: Path) -> None:
    install(site, "nvgemm-kernels-b")
    install(site, "nvgemm-kernels-a", files=("sm_90a.nvgemm", "sm_100f.nvgemm", "notes.txt"))
    found = find_wheel_bundles()
    assert [(b.distribution, b.version, b.path.name) for b in found] == [
        ("nvgemm-kernels-a", "1.0", "sm_100f.nvgemm"),
        ("nvgemm-kernels-a", "1.0", "sm_90a.nvgemm"),
        ("nvgemm-kernels-b", "1.0", "sm_90a.nvgemm"),
    ]
    assert all(bundle.path.is_absolute() and bundle.path.is_file() for bundle in found)
    assert "nvgemm_kernels_a" not in sys.modules


def test_relative_search_path_gives_absolute_paths(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", [""])
    assert [b.path for b in find_wheel_bundles()] == [site / "nvgemm_kernels_x" / "sm_90a.nvgemm"]


def test_a_file_that_two_paths_lead_to_comes_once(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    (tmp_path / "alias").symlink_to(site)
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "alias")])
    assert len(find_wheel_bundles()) == 1


def test_first_of_two_installations_of_a_distribution_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    install(tmp_path / "later")
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "later")])
    assert [site in bundle.path.parents for bundle in find_wheel_bundles()] == [True]


def usable_and_problems() -> tuple[list[str | None], list[str]]:
    """Distributions whose bundles can be opened, and what is said of the others."""
    found = find_wheel_bundles()
    problems = [one.problem for one in found if one.problem is not None]
    return [one.distribution for one in found if one.problem is None], problems


@pytest.mark.parametrize("value", ["", "pkg:attribute", "../outside", "a b", "/etc", "pkg [x]"])
def test_entry_point_that_names_no_package_is_a_problem(site: Path, value: str) -> None:
    install(site, value=value)
    install(site, "nvgemm-kernels-good")
    usable, (problem,) = usable_and_problems()
    assert usable == ["nvgemm-kernels-good"]
    assert "nvgemm-kernels-x" in problem


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "no RECORD"),
        ("", "lists no .nvgemm file in nvgemm_kernels_x"),
        ("../outside.nvgemm,,\nnvgemm_kernels_x/../../outside.nvgemm,,\n", "lists no .nvgemm file"),
    ],
)
def test_record_without_a_bundle_in_its_package_is_a_problem(
    site: Path, record: str | None, said: str
) -> None:
    info = install(site, files=())
    (site.parent / "outside.nvgemm").touch()
    if record is None:
        (info / "RECORD").unlink()
    else:
        (info / "RECORD").write_text(record)
    (found,) = find_wheel_bundles()
    assert found.path == info
    assert found.origin == "nvgemm-kernels-x 1.0"
    assert str(found.problem).endswith("; reinstall or uninstall it")
    (named,) = find_bundles()
    assert named.requirement == "nvgemm-kernels-x==1.0"
    assert "nvgemm-kernels-x" in str(found.problem)
    assert said in str(found.problem)


def test_a_missing_bundle_has_a_problem_and_the_others_are_kept(site: Path) -> None:
    install(site, files=("a.nvgemm", "b.nvgemm"))
    missing = site / "nvgemm_kernels_x" / "b.nvgemm"
    missing.unlink()
    kept, lost = find_wheel_bundles()
    assert (kept.path.name, kept.problem) == ("a.nvgemm", None)
    assert (lost.path, lost.origin) == (missing, "nvgemm-kernels-x 1.0")
    said = f"{missing} is missing, but the RECORD of nvgemm-kernels-x lists it; reinstall "
    assert lost.problem == f"{said}nvgemm-kernels-x"
    assert find_bundles()[1] == BundleFile(
        path=missing,
        origin=lost.origin,
        problem=lost.problem,
        requirement="nvgemm-kernels-x==1.0",
    )


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.4\nVersion: 1.0\n", "Name: x\n"])
def test_distribution_without_name_or_version_is_a_problem(site: Path, metadata: str) -> None:
    info = install(site, metadata=metadata)
    install(site, "nvgemm-kernels-good")
    usable, (problem,) = usable_and_problems()
    assert usable == ["nvgemm-kernels-good"]
    assert str(info) in problem or "distribution x " in problem
    (unnamed,) = (one for one in find_wheel_bundles() if one.problem)
    assert (unnamed.path, unnamed.origin) == (info, f"a kernel wheel at {info}")


@pytest.mark.parametrize("damage", ["METADATA", "entry_points.txt", "RECORD"])
def test_damage_of_one_distribution_does_not_hide_another(site: Path, damage: str) -> None:
    info = install(site)
    install(site, "nvgemm-kernels-good")
    (info / damage).write_bytes(b"nvgemm_aot.bundles\n\xff\xfe[[")
    usable, problems = usable_and_problems()
    assert usable == ["nvgemm-kernels-good"]
    assert len(problems) == 1


def test_what_pip_left_behind_is_passed_over(site: Path) -> None:
    """Of an uninstallation that was interrupted, beside the installation that followed."""
    left = install(site)
    left.rename(site / "~vgemm_kernels_x-1.0.dist-info")
    (site / "nvgemm_kernels_x").rename(site / "~vgemm_kernels_x")
    assert find_wheel_bundles() == ()
    install(site)
    assert usable_and_problems() == (["nvgemm-kernels-x"], [])


def test_a_damaged_distribution_on_a_relative_path_has_an_absolute_one(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = install(site)
    (info / "RECORD").unlink()
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", [""])
    assert [one.path for one in find_wheel_bundles()] == [info]


def test_says_nothing_of_damaged_distributions_of_others(site: Path) -> None:
    info = site / "other-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nnot an entry point\n")
    assert find_wheel_bundles() == ()


def test_importing_loads_neither_the_builder_nor_torch() -> None:
    code = (
        "import sys, nvgemm_runtime.installed.discover as d; d.find_wheel_bundles();"
        "assert not {'torch', 'cutlass', 'nvgemm_aot', 'zstandard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def named(tmp_path: Path, site: Path) -> Path:
    """A directory with two files that are called bundles."""
    directory = tmp_path / "named"
    directory.mkdir(mode=0o755)
    for name in ("b.nvgemm", "a.nvgemm", "notes.txt"):
        (directory / name).touch(mode=0o644)
    return directory


def candidates(monkeypatch: pytest.MonkeyPatch, *places: Path | str) -> tuple[BundleFile, ...]:
    monkeypatch.setenv("NVGEMM_AOT_BUNDLES", os.pathsep.join(map(str, places)))
    return find_bundles()


def problem_of(monkeypatch: pytest.MonkeyPatch, place: Path) -> str | None:
    (candidate,) = candidates(monkeypatch, place)
    return candidate.problem


def test_named_files_and_directories_come_in_order_and_before_wheels(
    named: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    other = named.parent / "other.anything"
    other.touch(mode=0o644)
    found = candidates(monkeypatch, other, named)
    assert [(c.origin, c.path.name) for c in found] == [
        ("NVGEMM_AOT_BUNDLES", "other.anything"),
        ("NVGEMM_AOT_BUNDLES", "a.nvgemm"),
        ("NVGEMM_AOT_BUNDLES", "b.nvgemm"),
        ("nvgemm-kernels-x 1.0", "sm_90a.nvgemm"),
    ]
    assert not any(c.problem for c in found)


def test_relative_names_and_empty_parts_are_understood(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(named)
    found = candidates(monkeypatch, "", "a.nvgemm", "")
    assert [c.path for c in found] == [named / "a.nvgemm"]


def test_a_file_that_is_named_twice_comes_once(
    named: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    (named / "link.nvgemm").symlink_to(named / "a.nvgemm")
    wheel = site / "nvgemm_kernels_x" / "sm_90a.nvgemm"
    found = candidates(monkeypatch, named / "a.nvgemm", named, wheel)
    assert [c.path.name for c in found] == ["a.nvgemm", "b.nvgemm", "sm_90a.nvgemm"]
    assert found[2].origin == "NVGEMM_AOT_BUNDLES"


def test_names_that_lead_nowhere_say_so(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = named / "empty"
    empty.mkdir()
    (named / "dangling").symlink_to(named / "gone")
    (named / "loop").symlink_to(named / "loop")
    for name, reason in {
        "missing.nvgemm": "No such file",
        "empty": "holds no .nvgemm file",
        "dangling": "No such file",
        "loop": "Too many levels of symbolic links",
    }.items():
        problem = problem_of(monkeypatch, named / name)
        assert problem is not None
        assert reason in problem
        assert name in problem


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("place", ["a.nvgemm", ".", ".."])
def test_refuses_what_others_can_write(
    named: Path, monkeypatch: pytest.MonkeyPatch, mode: int, place: str
) -> None:
    assert problem_of(monkeypatch, named / "a.nvgemm") is None
    writable = (named / place).resolve()
    before = writable.stat().st_mode
    writable.chmod(before | mode)
    problem = problem_of(monkeypatch, named / "a.nvgemm")
    writable.chmod(before)
    assert problem is not None
    assert f"{writable} can be written by others" in problem
    assert f"run: chmod go-w {writable}" in problem


def test_a_sticky_directory_is_no_danger_to_our_files(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named.chmod(0o1777)
    assert not any(c.problem for c in candidates(monkeypatch, named))
    (named / "a.nvgemm").chmod(0o666)
    assert "a.nvgemm can be written by others" in str(candidates(monkeypatch, named)[0].problem)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("place", ["a.nvgemm", "."])
def test_refuses_what_belongs_to_another_user(
    named: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    os.chown(named / place, 12345, -1)
    named.chmod(0o1777)
    problem = problem_of(monkeypatch, named / "a.nvgemm")
    assert problem is not None
    assert "belongs to another user (uid 12345)" in problem


def test_follows_links_through_every_directory_that_could_redirect_them(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = named.parent / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(Path("..") / "named" / "a.nvgemm")
    (named / "chain").symlink_to(shared / "link")
    assert problem_of(monkeypatch, named / "chain") is None
    shared.chmod(0o777)
    assert f"{shared} can be written" in str(problem_of(monkeypatch, named / "chain"))


def test_a_file_that_cannot_be_looked_at_does_not_hide_the_others(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dangling link, or a file that is deleted while its directory is listed."""
    (named / "0.nvgemm").symlink_to(named / "gone")
    found = candidates(monkeypatch, named)
    assert [c.path.name for c in found] == ["0.nvgemm", "a.nvgemm", "b.nvgemm"]
    assert [c.problem for c in found] == [
        f"{named / '0.nvgemm'}: No such file or directory",
        None,
        None,
    ]
