"""Kernels of a compiled program: how often they run, and what they read and write."""

import pytest
from shared.kernels import HBM, PEAK, REACHED, Kernel, kernels

PROGRAM = """
HloModule step, entry_computation_layout={()->f32[]}

%cut (p0: bf16[6,10,4], p1: s32[]) -> f32[10,4] {
  %p0 = bf16[6,10,4]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,10,4]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,10,4}
  %flat = bf16[10,4]{1,0} bitcast(%one)
  ROOT %wide = f32[10,4]{1,0} convert(%flat)
}

%into (p0: f32[6,10,4], p1: f32[10,4], p2: s32[]) -> f32[6,10,4] {
  %p0 = f32[6,10,4]{2,1,0} parameter(0)
  %p1 = f32[10,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %form = f32[1,10,4]{2,1,0} bitcast(%p1)
  ROOT %new = f32[6,10,4]{2,1,0} dynamic-update-slice(%p0, %form, %p2, %zero, %zero)
}

%rows (p0: bf16[10,4], p1: bf16[10,4], p2: bf16[10,4]) -> (f32[2,4], f32[3,4]) {
  %p0 = bf16[10,4]{1,0} parameter(0)
  %p1 = bf16[10,4]{1,0} parameter(1)
  %p2 = bf16[10,4]{1,0} parameter(2)
  %all = bf16[30,4]{1,0} concatenate(%p0, %p1, %p2), dimensions={0}
  %wide = f32[30,4]{1,0} convert(%all)
  %two = f32[2,4]{1,0} slice(%wide), slice={[12:14], [0:4]}
  %three = f32[3,4]{1,0} slice(%wide), slice={[18:21], [0:4]}
  ROOT %both = (f32[2,4]{1,0}, f32[3,4]{1,0}) tuple(%two, %three)
}

%body (state: (s32[], bf16[6,10,4], f32[6,10,4])) -> (s32[], bf16[6,10,4], f32[6,10,4]) {
  %state = (s32[], bf16[6,10,4]{2,1,0}, f32[6,10,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %xs = bf16[6,10,4]{2,1,0} get-tuple-element(%state), index=1
  %ys = f32[6,10,4]{2,1,0} get-tuple-element(%state), index=2
  %cut.1 = f32[10,4]{1,0} fusion(%xs, %i), kind=kLoop, calls=%cut
  %into.1 = f32[6,10,4]{2,1,0} fusion(%ys, %cut.1, %i), kind=kLoop, calls=%into
  ROOT %next = (s32[], bf16[6,10,4]{2,1,0}, f32[6,10,4]{2,1,0}) tuple(%i, %xs, %into.1)
}

%more (state: (s32[], bf16[6,10,4], f32[6,10,4])) -> pred[] {
  %state = (s32[], bf16[6,10,4]{2,1,0}, f32[6,10,4]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: bf16[10,4], b: bf16[4,8], s: (s32[], bf16[6,10,4], f32[6,10,4])) -> (f32[2,4], f32[3,4]) {
  %a = bf16[10,4]{1,0} parameter(0)
  %b = bf16[4,8]{1,0} parameter(1)
  %s = (s32[], bf16[6,10,4]{2,1,0}, f32[6,10,4]{2,1,0}) parameter(2)
  %loop = (s32[], bf16[6,10,4]{2,1,0}, f32[6,10,4]{2,1,0}) while(%s), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %product = (bf16[10,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %sent = bf16[10,4]{1,0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%more
  ROOT %rows.1 = (f32[2,4]{1,0}, f32[3,4]{1,0}) fusion(%a, %a, %sent), kind=kLoop, calls=%rows
}
"""  # noqa: E501


def test_counts_turns_of_loops_parts_of_arrays_and_what_is_written_in_place() -> None:
    found = {each.name: each for each in kernels(PROGRAM)}
    assert {name: each.count for name, each in found.items()} == {
        "cut.1": 6, "into.1": 6, "product": 1, "sent": 1, "rows.1": 1
    }  # fmt: skip
    index = 4
    assert found["cut.1"].bytes == 10 * 4 * 2 + index + 10 * 4 * 4
    assert found["into.1"].bytes == 2 * 10 * 4 * 4  # where it goes aside
    # Of the rows 12 to 14 and 18 to 21, four are of the second array, and one of the third.
    assert found["rows.1"].bytes == 5 * 4 * 4 + 5 * 4 * 2
    assert found["product"].bytes == (10 * 4 + 4 * 8 + 10 * 8) * 2
    assert found["product"].flops == 2 * 10 * 4 * 8 and not found["cut.1"].flops
    assert found["sent"].bytes == 0


def test_seconds_are_those_of_what_binds() -> None:
    assert Kernel("a", "", 3, HBM / 2, 0.0).seconds == pytest.approx(1.5)
    assert Kernel("a", "", 2, HBM, REACHED * PEAK).seconds == pytest.approx(2.0)


def test_an_array_behind_a_form_is_read_by_rows() -> None:
    """As XLA writes a layer's part of a stack: a bitcast of the stack, and a slice of that."""
    shape = "bf16[6,10,4]{2,1,0}"
    text = PROGRAM.replace("%one = bf16[1,10,4]{2,1,0} dynamic-slice(%p0, ", (
        "%form = bf16[60,4]{1,0} bitcast(%p0)\n  %one = bf16[10,4]{1,0} dynamic-slice(%form, "
    )).replace(", %zero, %zero), dynamic_slice_sizes={1,10,4}", ", %zero), dynamic_slice_sizes={10,4}")  # fmt: skip
    assert text != PROGRAM and shape in text
    assert {e.name: e.bytes for e in kernels(text)}["cut.1"] == 10 * 4 * 2 + 4 + 10 * 4 * 4
