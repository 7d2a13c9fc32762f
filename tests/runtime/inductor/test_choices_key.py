"""The option that ties compile caches of others, such as vLLM's, to bundles and settings."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import recording_kernels
from inductor_session import InductorSession
from nvgemm_aot.pipeline.pipeline import BuiltBundle
from nvgemm_aot.storage.build_cache import Cache
from nvgemm_runtime.bundle.format import PREFIX
from nvgemm_runtime.installed import digest
from nvgemm_runtime.installed.discover import PREFIX_BYTES
from nvgemm_runtime.installed.registry import INSTALLATION


def portable_key() -> str:
    """The option among those that vLLM hashes into the names of its cache directories."""
    key = config.save_config_portable()["nvgemm_aot_key"]
    assert isinstance(key, str)
    return key


@pytest.fixture(scope="module")
def other(kernel_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another bundle."""
    import cpu_provider

    return recording_kernels.build_recording(
        [cpu_provider.problem()], tmp_path_factory.mktemp("other"), kernel_cache
    ).path


def test_it_follows_bundles_that_come_are_replaced_and_go(
    inductor: InductorSession, recording_bundle: BuiltBundle, other: Path, tmp_path: Path
) -> None:
    """All in one process that has not opened any yet."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "first.nvgemm").write_bytes(b"")
    inductor.use(place)
    keys = [portable_key()]
    for source in (recording_bundle.path, other):
        shutil.copy(source, place / "new")
        (place / "new").rename(place / "first.nvgemm")
        keys.append(portable_key())
    inductor.use()
    keys.append(portable_key())
    assert len(set(keys)) == 4
    inductor.use(recording_bundle.path)
    assert portable_key() == keys[1]


def test_it_follows_confirmations_that_come_are_replaced_and_go(
    inductor: InductorSession, recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    """In a process that has not opened any bundle yet, and the same in one that has."""
    own, named = tmp_path / "own", tmp_path / "named"
    named.mkdir()
    inductor.monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(own))
    inductor.use(recording_bundle.path, named)
    keys = [portable_key()]
    own.mkdir()
    for content in (b"{}", b"[]"):
        (own / "new").write_bytes(content)
        (own / "new").rename(own / "a.confirmed.json")
        keys.append(portable_key())
    (named / "b.confirmed.json").write_bytes(b"{}")
    keys.append(portable_key())
    (own / "a.confirmed.json").chmod(0o666)
    (own / "a.confirmed.json").touch()
    keys.append(portable_key())
    assert len(set(keys)) == 5
    INSTALLATION.bundles()
    assert portable_key() == keys[-1]
    for file in (own / "a.confirmed.json", named / "b.confirmed.json"):
        file.unlink()
    assert portable_key() == keys[-1], "it has read them"
    digest.forget()
    assert portable_key() == keys[0]


def test_confirmations_without_bundles_change_nothing(
    inductor: InductorSession, tmp_path: Path
) -> None:
    inductor.monkeypatch.setenv("NVGEMM_AOT_CONFIRMED", str(tmp_path))
    inductor.use()
    before = portable_key()
    (tmp_path / "a.confirmed.json").write_bytes(b"{}")
    digest.forget()
    assert portable_key() == before
    assert not digest.has_bundles()


def test_it_names_no_place(
    inductor: InductorSession, recording_bundle: BuiltBundle, tmp_path: Path
) -> None:
    """Caches move between machines."""
    keys, unusable = set(), set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        copy = Path(shutil.copy(recording_bundle.path, tmp_path / name))
        inductor.use(copy)
        keys.add(portable_key())
        copy.chmod(0o666)
        inductor.use(copy)
        unusable.add(portable_key())
    assert (len(keys), len(unusable)) == (1, 1)
    assert keys != unusable


def test_once_bundles_are_open_it_describes_those(
    inductor: InductorSession, recording_bundle: BuiltBundle, other: Path, tmp_path: Path
) -> None:
    used = Path(shutil.copy(recording_bundle.path, tmp_path / "used.nvgemm"))
    inductor.use(used)
    before = portable_key()
    INSTALLATION.bundles()
    used.unlink()
    shutil.copy(other, used)
    assert portable_key() == before


@pytest.mark.parametrize(
    "variable", ["NVGEMM_AOT_MAX_CHOICES", "NVGEMM_AOT_DEFAULT_MODE", "NVGEMM_AOT_RECORD"]
)
def test_it_follows_settings(
    inductor: InductorSession, recording_bundle: BuiltBundle, variable: str, tmp_path: Path
) -> None:
    inductor.use(recording_bundle.path)
    before = portable_key()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, str(tmp_path / "file") if variable.endswith("RECORD") else "0")
        assert portable_key() != before
    assert portable_key() == before


def test_nobody_can_set_it(inductor: InductorSession, recording_bundle: BuiltBundle) -> None:
    """Copies of all options are patched in, and come from other processes."""
    inductor.use(recording_bundle.path)
    key = portable_key()
    stale = config.get_config_copy() | {"nvgemm_aot_key": "stale"}
    with config.patch(stale):
        assert portable_key() == key
    with config.patch(nvgemm_aot_key="stale"):
        assert config.nvgemm_aot_key == key
    config.load_config(pickle.dumps({"nvgemm_aot_key": "stale"}))
    assert pickle.loads(config.save_config())["nvgemm_aot_key"] == key
    torch.compile(torch.mm, options={"nvgemm_aot_key": "stale"})
    assert portable_key() == key
    assert "nvgemm_aot_key" not in config.codegen_config(), "it needs not be there to reproduce"


def test_what_torch_keeps_of_its_options_is_renewed(
    inductor: InductorSession, recording_bundle: BuiltBundle
) -> None:
    """Torch asks for the passes' keys at every graph."""
    from nvgemm_runtime.inductor.configuration.cache_key import CacheKeyPass

    inductor.use()
    stale, hashed = config.save_config(), config.get_hash()
    inductor.use(recording_bundle.path)
    CacheKeyPass().uuid()
    assert config.save_config() != stale
    assert config.get_hash() != hashed


def test_a_bundle_is_identified_by_all_of_its_prefix() -> None:
    assert PREFIX.size == PREFIX_BYTES
