"""Compiled code that is run by interpreting it: every instruction does what PTX's manual says."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "scripts" / "accelerators")]

import hlo  # noqa: E402
import interpret  # noqa: E402
import programs  # noqa: E402
import ptx  # noqa: E402

HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .align 16 kernel_param_0,
	.param .u64 .ptr .align 16 kernel_param_1
)
.reqntid 4, 1, 1
{
	.reg .pred 	%p<4>;
	ld.param.b64 	%rd1, [kernel_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	ld.param.b64 	%rd3, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	shl.b32 	%r3, %r2, 2;
	or.b32 	%r4, %r3, %r1;
	mul.wide.u32 	%rd4, %r4, 4;
	add.s64 	%rd5, %rd2, %rd4;
	add.s64 	%rd6, %rd3, %rd4;
	ld.global.nc.b32 	%r5, [%rd5];
"""


def run(body: str, x: np.ndarray) -> np.ndarray:
    """What a kernel makes of four-byte numbers, one per thread."""
    kernel = ptx.Kernel(HEAD + body + "\n}\n")
    memory = np.zeros(256 + 8 * len(x), np.uint8)
    memory[256 : 256 + 4 * len(x)] = x.view(np.uint8)
    kernel.run(memory, [256, 256 + 4 * len(x)], len(x) // 4)
    return memory[256 + 4 * len(x) :].view(x.dtype)


def test_threads_part_and_meet_again() -> None:
    """Halving as often as a thread's number says, then one addition for all."""
    body = """
	mov.b32 	%r6, %r4;
$L__BB0_1:
	setp.eq.b32 	%p1, %r6, 0;
	@%p1 bra 	$L__BB0_3;
	mul.rn.f32 	%r5, %r5, 0f3F000000;
	add.s32 	%r6, %r6, -1;
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	add.rn.f32 	%r7, %r5, 0f3F800000;
	st.global.b32 	[%rd6], %r7;
	ret;"""
    x = np.linspace(1, 3, 8, dtype=np.float32)
    np.testing.assert_array_equal(run(body, x), x * 0.5 ** np.arange(8, dtype=np.float32) + 1)


INTEGERS = np.array([0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 123456789, 3000000000], np.uint32)
FLOATS = np.array([0.0, -0.0, 1.5, -2.25, np.inf, np.nan, 1e-30, 3e7], np.float32)
CASES = [
    ("shf.l.wrap.b32 %r6, %r5, %r5, 13;", INTEGERS, lambda x: (x << 13) | (x >> 19)),
    ("mul.hi.u32 %r6, %r5, 2863311531;", INTEGERS, lambda x: (x * 2863311531) >> 32),
    ("mad.lo.s32 %r6, %r5, 3, %r5;", INTEGERS, lambda x: 4 * x),
    ("bfe.u32 %r6, %r5, 9, 23;", INTEGERS, lambda x: x >> 9),
    ("shr.u32 %r6, %r5, 31;", INTEGERS, lambda x: x >> 31),
    ("shr.s32 %r6, %r5, 31;", INTEGERS, lambda x: 2**32 - 1 if x >> 31 else 0),
    ("and.b32 %r6, %r5, 255;", INTEGERS, lambda x: x & 255),
    ("mov.b32 %r6, 0f3C08839E;", INTEGERS, lambda x: 0x3C08839E),
    ("setp.lt.s32 %p1, %r5, 0;\n selp.b32 %r6, 1, 2, %p1;", INTEGERS, lambda x: 2 - (x >> 31)),
    ("setp.lt.u32 %p1, %r5, 8;\n selp.b32 %r6, 1, 2, %p1;", INTEGERS, lambda x: 2 - (x < 8)),
]


@pytest.mark.parametrize(("line", "x", "right"), CASES, ids=lambda one: str(one)[:16])
def test_instructions_on_integers(line: str, x: np.ndarray, right) -> None:
    found = run(f"{line}\nst.global.b32 [%rd6], %r6;\nret;", x)
    assert found.tolist() == [right(int(one)) % 2**32 for one in x]


def test_instructions_on_floats() -> None:
    x = FLOATS

    def of(line: str) -> np.ndarray:
        return run(f"{line}\nst.global.b32 [%rd6], %r6;\nret;", x)

    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(of("fma.rn.f32 %r6, %r5, %r5, 0fBF800000;"), x * x - 1)
        np.testing.assert_array_equal(of("neg.f32 %r6, %r5;").view(np.uint32), (-x).view(np.uint32))
        np.testing.assert_array_equal(of("sqrt.approx.f32 %r6, %r5;"), np.sqrt(x))
        # The smaller of a number and NaN is the number.
        np.testing.assert_array_equal(of("min.f32 %r6, %r5, 0f3F800000;"), np.fmin(x, 1))
    below = of("setp.lt.f32 %p1, %r5, 0f3F800000;\nselp.f32 %r6, 0f3F800000, 0f00000000, %p1;")
    np.testing.assert_array_equal(below, (x < 1).astype(np.float32))
    unordered = of("setp.ltu.f32 %p1, %r5, 0f3F800000;\nselp.f32 %r6, 0f3F800000, 0f00000000, %p1;")
    np.testing.assert_array_equal(unordered, (~(x >= 1)).astype(np.float32))


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="dp4a"):
        run("dp4a.u32.u32 %r6, %r5, %r5, %r5;\nret;", INTEGERS)


def test_launches_and_places_are_read() -> None:
    text = """000: kCommandBuffer [source | next=002 (1)]
    001: kCopy         [source | sink] kCopy
002: kWhile         [prev=000 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source | sink] add_1 grid: [3, 2, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
005: kCopy [prev=002 (1) | sink] kCopy
"""
    names = {1: "copy.1", 2: "while.1", 3: "compare", 4: "add.7", 5: "copy.2"}
    first, loop, last = interpret._launches(text, names)
    assert (first.kind, first.instruction, last.instruction) == ("Copy", "copy.1", "copy.2")
    assert loop.body == [interpret.Launch("CustomKernel", "add.7", "add_1", 6, [])]
    places, size = interpret._memory(
        "allocation 0: size 300, parameter 6:\n"
        " value: <1 x.1 @0> (size=300,offset=0): f32[75]{0}\n"
        "allocation 1: size 64, preallocated-temp:\n"
        " value: <2 while.1{3} (phi) @0> (size=4,offset=16): s32[]\n"
    )
    assert places == {("x.1", ""): (256, 300), ("while.1", "3"): (256 + 512 + 16, 4)}
    assert size == 256 + 512 + 256


def test_products_of_less_than_full_precision_are_told_and_their_names_are_not() -> None:
    full = "  %dot.1 = f32[8]{0} dot(%a, %b), operand_precision={highest,highest}"
    name = "  %bitcast.2 = f32[8]{0} bitcast(%gemm_fusion_dot.1)"
    assert hlo.low_precision(f"{full}\n{name}\n") == []
    less = hlo.low_precision("  %dot.3 = f32[8]{0} dot(%a, %b)\n")
    assert less == ["dot dot.3 without full precision"]
    assert hlo.low_precision("  %x = bf16[8]{0} add(%a, %b)\n") == ["bf16[8]"]
    copy = "  %copy.4 = f32[8]{0} copy(%gemm_fusion_dot.1)"
    calls = "  %gemm_fusion_dot.1 = f32[8]{0} fusion(%a), kind=kCustom, calls=%gemm_fusion_dot.1_computation"
    assert hlo.low_precision(f"{full}\n{copy}\n{calls}\n") == []
    assert len(hlo.products(f"{full}\n{copy}\n{calls}\n")) == 1
    library = '  %custom.5 = (f32[8]{0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"'
    assert hlo.low_precision(library) == ["custom-call custom.5 without full precision"]
    precise = ', backend_config={"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}'
    assert hlo.low_precision(library + precise) == []


PROGRAM = """HloModule jit_run

%inner (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%x, %x)
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %v = f32[8]{0} get-tuple-element(%carry), index=1
  %next = s32[] add(%i, %i)
  %fusion.1 = f32[8]{0} fusion(%v), kind=kLoop, calls=%inner
  %fusion.2 = f32[8]{0} fusion(%fusion.1), kind=kLoop, calls=%inner
  ROOT %made = (s32[], f32[8]{0}) tuple(%next, %fusion.2)
}

%limit (carry: (s32[], f32[8])) -> pred[] {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %end = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %copy.1 = f32[8]{0} copy(%a)
  %call.1 = f32[8]{0} call(%copy.1), to_apply=%inner, metadata={op_name="once"}
  %begun = (s32[], f32[8]{0}) tuple(%zero, %call.1)
  %while.1 = (s32[], f32[8]{0}) while(%begun), condition=%limit, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %out = f32[8]{0} get-tuple-element(%while.1), index=1
  ROOT %last = f32[8]{0} negate(%out)
}
"""


def test_kernels_of_a_whole_program_are_counted_with_its_loops() -> None:
    """A copy, what is called and a negation, and four times two fusions and the counter."""
    assert hlo.launches(PROGRAM, scalars=True) == 3 + 4 * 3
    assert hlo.launches(PROGRAM, scalars=False) == 3 + 4 * 2
    (loop,) = hlo.loops(PROGRAM, scalars=True)
    assert (loop.trips, len(loop.kernels)) == (4, 3)


def test_what_happens_between_the_blocks_of_a_run_is_counted() -> None:
    """Anchors where the observations have grown by half, in whole blocks; of all Hessians each turn of their loop that has a pair."""
    edges = [64]
    while edges[-1] < 5_000:
        edges.append(max(64 * int(1.5 * edges[-1] / 64), edges[-1] + 64))
    device = jax.devices()[0]
    found = programs.Programs("linear", "h100", device, programs.methods()["one-step"]).asked(1)
    assert found.anchors == len(edges) - 1
    assert 5_000 < found.steps < 5_000 + 64 + 1
    assert set(found.rooms) <= {1, 4}
    assert len(found.rooms) >= found.anchors  # every bin has some
    base = {"problem": "linear", "lanes": 1, "dim": programs.DIM, "pairs": 0, "loops": []}
    compiled = [
        {**base, "program": "anchor", "launches": 80},
        {**base, "program": "anchor, 20 parameters", "launches": 1000, "dim": 20},
        {**base, "program": "block", "launches": 1000},
        {
            **base,
            "program": "Hessians",
            "launches": 34,
            "pairs": 4,
            "loops": [{"kernels": 6 * [""]}],
        },
    ]
    asked = programs.Asked(steps=1_000, anchors=2, rooms=[4, 1, 4])
    share = programs.between("linear", 1, asked, compiled)
    assert share["kernels_a_step"] == (2 * 80 + 34 + (34 - 3 * 6) + 34) / 1_000
