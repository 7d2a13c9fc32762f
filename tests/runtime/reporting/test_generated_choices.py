from __future__ import annotations

import pytest

from nvgemm_runtime.reporting import generated_choices as choices

FIRST, SECOND = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without choices."""
    for name in ("_kernels", "_tables", "_failed"):
        monkeypatch.setattr(choices, name, set())


def test_the_order_of_graphs_does_not_matter() -> None:
    choices.note_kernel(FIRST)
    choices.note_kernel(SECOND)
    choices.note_table([8, 16], ["", FIRST, SECOND])
    choices.note_table([8, 32], ["", FIRST, SECOND])
    before = choices.choices_digest()
    for noted in (choices._kernels, choices._tables):
        noted.clear()
    choices.note_table([8, 32], ["", FIRST, SECOND])
    choices.note_table([8, 16], ["", FIRST, SECOND])
    choices.note_kernel(SECOND)
    choices.note_kernel(FIRST)
    assert choices.choices_digest() == before


def test_kernels_bounds_and_failures_matter() -> None:
    digests = [choices.choices_digest()]

    def note(function: object, *arguments: object) -> None:
        function(*arguments)  # type: ignore[operator]
        digests.append(choices.choices_digest())

    note(choices.note_kernel, FIRST)
    note(choices.note_table, [8], ["", FIRST])
    note(choices.note_table, [9], ["", FIRST])
    note(choices.note_failure, FIRST)
    assert len(set(digests)) == len(digests)


def test_failures_outside_generated_code_do_not_matter() -> None:
    before = choices.choices_digest()
    choices.note_failure(SECOND)
    assert choices.choices_digest() == before
