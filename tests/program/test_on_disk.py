"""What a loop is told of the steps that a program keeps on disk, its own and those of others."""

from pathlib import Path

from contract import subject, walking_program
from starts import begin

from cjax.program.on_disk import elsewhere, on_disk

NAME = "linen_tied"
ALL = "data=8 offload=params+optimizer host=0B disk=10MB"


def test_a_step_is_kept_with_what_was_noted_and_others_are_told_from_it(tmp_path: Path) -> None:
    program = walking_program(NAME, ALL, tmp_path)
    disk = on_disk(program)
    assert disk is not None and Path(disk.folder).is_relative_to(tmp_path)
    state = begin(program)
    disk.note({"samples": 16})
    state, _ = program.step(state, subject(NAME, False).batches[0])
    assert on_disk(program).kept == (1, {"samples": 16})  # type: ignore[union-attr]
    disk.note(None)
    state, _ = program.step(state, subject(NAME, False).batches[1])
    assert on_disk(program).kept == (2, {})  # type: ignore[union-attr]
    assert int(disk.scaling(state).num_skipped) == 0
    assert elsewhere(program) == [], "its own"

    other = walking_program(NAME, "data=8 offload=params+optimizer host=0B disk=11MB", tmp_path)
    (found,) = elsewhere(other)
    assert (found.step, found.note, found.differing) == (2, {}, ("plan",))
    assert found.plan == f"{program.plan} on 8 devices"


def test_a_program_that_keeps_some_of_it_elsewhere_is_not_on_disk(tmp_path: Path) -> None:
    assert on_disk(walking_program(NAME, "data=8 offload=params+optimizer", tmp_path)) is None
    assert elsewhere(walking_program(NAME, "data=8 offload=params+optimizer")) == []
