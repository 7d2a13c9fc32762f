"""Time of a thread within a package, by its stack."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.shared import stacks
from benchmarks.shared.stacks import TimeWithin, is_within

LIMIT_S = 60


@pytest.fixture
def call_within() -> Callable[[Callable[[], object]], object]:
    """Returns a function in a module of package `looked_for` that calls another."""
    module = ModuleType("looked_for.inside")
    exec("def call(other):\n    return other()", vars(module))
    return module.call  # type: ignore[no-any-return]


def here() -> bool:
    return is_within(sys._getframe(), {"looked_for"})


def test_what_a_package_calls_is_its_own(call_within: Callable[..., object]) -> None:
    assert call_within(here) is True
    assert here() is False
    assert call_within(lambda: is_within(sys._getframe(), {"looked", "looked_for_more"})) is False
    assert is_within(None, {"looked_for"}) is False


def test_its_import_hook_is_not(
    call_within: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "IMPORT_HOOKS", {"looked_for.inside"})
    assert call_within(here) is False


def test_what_is_done_in_any_case_is_not(
    call_within: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds even if the package is the first caller."""
    assert call_within(lambda: here()) is True
    monkeypatch.setattr(stacks, "IN_ANY_CASE", {(__name__, "here")})
    assert call_within(lambda: here()) is False


def test_what_happens_while_it_is_imported_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes modules of other packages that it imports, and time before its own code."""
    (tmp_path / "looked_for.py").write_text("import imported_by_it")
    (tmp_path / "imported_by_it.py").write_text("import seen\nseen.append(seen.here())")
    found: list[bool] = []
    seen = ModuleType("seen")
    vars(seen).update(here=here, append=found.append)
    monkeypatch.setitem(sys.modules, "seen", seen)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("imported_by_it", "looked_for"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import imported_by_it  # type: ignore[import-not-found]  # noqa: F401

    assert found == [False]
    del sys.modules["imported_by_it"]
    import looked_for  # type: ignore[import-not-found]  # noqa: F401

    assert found == [False, True]
    del sys.modules["imported_by_it"], sys.modules["looked_for"]


def test_seconds_grow_within_alone(call_within: Callable[..., object]) -> None:
    ended = time.monotonic() + LIMIT_S
    with TimeWithin({"looked_for"}) as within:

        def wait() -> None:
            while not within.seconds:
                assert time.monotonic() < ended
                time.sleep(stacks.EVERY_S)

        call_within(wait)
        time.sleep(4 * stacks.EVERY_S)  # the look that was under way may still count
        seconds = within.seconds
        time.sleep(10 * stacks.EVERY_S)
        assert within.seconds == seconds > 0
    assert within.seconds == seconds
