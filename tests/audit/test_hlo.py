"""HLO text as data: every form that replica groups take, trip counts, and FLOPs counted by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.audit import audit_text, hlo


def instruction(attributes: str) -> hlo.Instruction:
    return hlo.Instruction("x", "all-reduce", (), (), attributes, False)


def groups(text: str, num_devices: int = 8):
    return hlo.replica_groups(instruction(f"channel_id=1, replica_groups={text}, to_apply=%add"), num_devices)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("{{0,1,2},{3}}", ((0, 1, 2), (3,))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_replica_groups(text, expected):
    assert groups(text) == expected


def test_groups_of_an_unknown_form_are_not_guessed():
    with pytest.raises(ValueError, match="replica groups"):
        groups("torus[2,4]")


def test_permutes_leave_out_pairs_with_oneself():
    pairs = instruction("source_target_pairs={{0,0},{1,2},{2,1}}, channel_id=1")
    assert hlo.replica_groups(pairs, 4) == ((1, 2), (2, 1))


def test_instruction_with_tuple_result_comments_and_braces():
    module = hlo.parse(
        """HloModule jit_f, num_partitions=4

%body (p: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  ROOT %p = (s32[], /*index=1*/f32[2,3]{1,0:T(8,128)}) parameter(0)
}

ENTRY %main.1_spmd (a: bf16[4,5]) -> f32[] {
  %a = bf16[4,5]{1,0} parameter(0), metadata={op_name="x[\\"w (a)\\"]"}
  %c = f32[2]{0} constant({1, (2)})
  %t = (f8e4m3fn[3]{0}, pred[]) custom-call(%a, /*index=1*/%c), called_computations={%body, %body}, target="f"
  ROOT %d = f32[] call(%t), to_apply=%body
}
"""
    )
    assert module.entry == "main.1_spmd" and module.num_devices == 4
    a, c, t, d = module.computations["main.1_spmd"]
    assert (a.bytes, c.attributes, t.bytes) == (40, "{1, (2)}", 4)
    assert t.operands == ("a", "c") and t.called == ("body", "body") and t.attribute('target="(.)"') == "f"
    assert d.is_root and d.called == ("body",)
    (body,) = module.computations["body"]
    assert body.shapes == (hlo.Shape("s32", ()), hlo.Shape("f32", (2, 3)))


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("module @jit_f {}")


def test_unknown_dtype_is_an_error_not_a_guess():
    with pytest.raises(KeyError):
        _ = hlo.Shape("x3", (2,)).bytes


def while_of(text: str) -> tuple[hlo.Instruction, hlo.Module]:
    module = hlo.parse(text)
    (loop,) = [each for lines in module.computations.values() for each in lines if each.opcode == "while"]
    return loop, module


@pytest.mark.parametrize("known", [True, False], ids=["said by XLA", "read off the condition"])
def test_trip_count_of_a_scan(known):
    compiled = jax.jit(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ x), None), x, None, length=7)[0])
    text = compiled.lower(jnp.ones((4, 4))).compile().as_text()
    if not known:
        text = re.sub(r'"known_trip_count":\{"n":"7"\},?', "", text)
        assert "known_trip_count" not in text
    assert hlo.trip_count(*while_of(text)) == 7
    assert audit_text(text).flops == 7 * 2 * 4**3


def test_trip_count_that_data_decides_is_unknown_and_counted_once():
    compiled = jax.jit(lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c @ x, x))
    text = compiled.lower(jnp.ones((4, 4))).compile().as_text()
    assert hlo.trip_count(*while_of(text)) is None
    facts = audit_text(text)
    assert facts.unknown_loops == 1 and facts.flops == 2 * 4**3
    assert "unknown length" in str(facts)


def flops(function, *arguments) -> float:
    return audit_text(jax.jit(function).lower(*arguments).compile().as_text()).flops


def test_flops_of_dots():
    a, b = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 11))
    assert flops(lambda a, b: jnp.sin(a) @ b, a, b) == 2 * 3 * 5 * 7 * 11
    assert flops(lambda a, b: jnp.einsum("bij,bjk->ik", a, b), a, b) == 2 * 3 * 5 * 7 * 11
    assert flops(lambda a: a.sum(), a) == 0


def test_flops_of_nested_loops_multiply():
    def inner(c, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), c, None, length=3)[0], None

    assert flops(lambda c, w: jax.lax.scan(inner, c, w)[0], jnp.ones((8, 8)), jnp.ones((5, 8, 8))) == 15 * 2 * 8**3


def test_flops_of_a_convolution_and_its_gradients():
    x, k = jnp.ones((2, 16, 16, 3)), jnp.ones((3, 3, 3, 8))

    def convolve(x, k, groups=1):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups)

    forward = 2 * (2 * 16 * 16 * 8) * (3 * 3 * 3)
    assert flops(convolve, x, k) == forward
    loss = lambda x, k: (convolve(x, k) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(flops(jax.grad(loss, argnums=(0, 1)), x, k), 3 * forward)
    depthwise = jnp.ones((3, 3, 1, 3))
    assert flops(lambda x, k: convolve(x, k, 3), x, depthwise) == 2 * (2 * 16 * 16 * 3) * 9


LIBRARY_CALLS = """HloModule calls

ENTRY %main (x: f32[16,65,65,64]) -> f32[16,32,32,128] {
  %x = f32[16,65,65,64]{3,2,1,0} parameter(0)
  %k = f32[128,3,3,64]{3,2,1,0} parameter(1)
  %y = (f32[16,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %dy = f32[16,32,32,128]{3,2,1,0} get-tuple-element(%y), index=0
  %dk = (f32[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx = (f32[16,65,65,64]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %k), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %a = bf16[128,64]{1,0} parameter(2)
  %b = bf16[64,32]{1,0} parameter(3)
  %c = (bf16[128,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q = bf16[2,6,4,8]{3,2,1,0} parameter(4)
  %w = bf16[2,10,2,8]{3,2,1,0} parameter(5)
  %m = (bf16[2,6,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %w, %w), custom_call_target="__cudnn$fmhaSoftmax"
  %n = (bf16[2,6,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %w, %w), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %o = (bf16[128,32]{1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__some$attention"
  %g = s32[4]{0} parameter(6)
  %t = bf16[4,64,32]{2,1,0} parameter(7)
  %u = bf16[128,32]{1,0} custom-call(%g, %a, %t), custom_call_target="mosaic_gpu_v2"
  %v = bf16[4,32,64]{2,1,0} custom-call(%g, %g, %u, %a), custom_call_target="mosaic_gpu_v2"
  %z = bf16[128,64]{1,0} custom-call(%a, %b), custom_call_target="mosaic_gpu_v2"
  ROOT %r = f32[16,32,32,128]{3,2,1,0} get-tuple-element(%y), index=0
}
"""  # noqa: E501


def test_flops_of_library_calls_and_those_it_cannot_count():
    facts = audit_text(LIBRARY_CALLS)
    products = 2 * 4 * 6 * 10 * 8  # of two examples' four heads, 6 queries and 10 keys of width 8
    matmuls = 3 * 2 * 128 * 32 * 64  # one, and one of rows in groups in each direction
    assert facts.flops == 3 * 2 * (16 * 32 * 32 * 128) * (64 * 9) + matmuls + 2 * (2 + 5) * products
    assert facts.uncounted == ("__some$attention",) and "__some$attention" in str(facts)
    assert facts.attention_kernels == ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
