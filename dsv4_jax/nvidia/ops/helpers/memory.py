"""CuTeDSL: global and shared memory, sixteen bytes at a time where a row allows it.

Addresses are integers, in bytes: of global memory 64-bit ones, of shared memory 32-bit ones. Loads and stores are
predicated instead of branched around, so that all loads of a window can be in flight before the first is used.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

BYTES = {"float32": 4, "bfloat16": 2}

# A bfloat16 is the upper half of a float32.
_LOAD4 = {
    "float32": "{when}ld.{space}.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{at}];",
    "bfloat16": (
        ".reg .b32 low, high; mov.b32 low, 0; mov.b32 high, 0;"
        " {when}ld.{space}.v2.b32 {{ low, high }}, [{{$r0}}+{at}];"
        " shl.b32 {{$w0}}, low, 16; and.b32 {{$w1}}, low, 0xFFFF0000;"
        " shl.b32 {{$w2}}, high, 16; and.b32 {{$w3}}, high, 0xFFFF0000;"
    ),
}
_ZERO = {"float32": " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4)), "bfloat16": ""}


def load4(address: Int64, present, dtype: str = "float32", *, once: bool = False) -> tuple:
    """Four channels as float32; zeros, and no access, where `present` does not hold.

    Args:
      address: of the first channel, a multiple of four channels' bytes.
      present: Boolean, or True.
      dtype: in memory, "float32" or "bfloat16".
      once: nobody reads these bytes again, so they need not push others out of the L1 cache.
    """
    load = _LOAD4[dtype].format(when="@p ", space="global.L1::no_allocate" if once else "global", at=0)
    return cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {_ZERO[dtype]} {load} }}",
        write_only_types=[Float32] * 4,
        read_only_args=[address, Int32(present)],
    )


def load_int4(address: Int64) -> tuple:
    """Four int32 at a multiple of 16 bytes."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load(address: Int64, dtype=Int32, present=True):
    """One 32-bit element; zero, and no access, where `present` does not hold."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}]; }",
        write_only_types=[dtype],
        read_only_args=[address, Int32(present)],
    )


def store4(address: Int64, values, present=True) -> None:
    """Four float32 at a multiple of 16 bytes."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r5}, 0; @p st.global.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} }; }",
        read_only_args=[address, *values, Int32(present)],
    )


def store_words(address: Int64, words, present=True) -> None:
    """int32 words, each by itself: pages are only known to begin at multiples of four bytes."""
    for i, word in enumerate(words):
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.b32 [{$r0}], {$r1}; }",
            read_only_args=[address + 4 * i, word, Int32(present)],
        )


def store_byte(address: Int64, value: Int32, present=True) -> None:
    """The low byte of `value`."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.b8 [{$r0}], {$r1}; }",
        read_only_args=[address, value, Int32(present)],
    )


def store_in_peer(pointer: cute.Pointer, rank: Int32, value: Float32, present) -> None:
    """A float32 into the shared memory of another CTA of the cluster, at the place that `pointer` is in this one."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 peer; setp.ne.s32 p, {$r3}, 0;"
        " mapa.shared::cluster.u32 peer, {$r0}, {$r1}; @p st.shared::cluster.f32 [peer], {$r2}; }",
        read_only_args=[pointer.toint(), rank, value, Int32(present)],
    )


def copy16(target: Int32, source: Int64, present, *, into: int, at: int) -> None:
    """Begins to copy sixteen bytes from global address `source + at` to shared address `target + into`.

    `into` and `at` are part of the instruction. The bytes do not go through the L1 cache.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0;"
        f" @p cp.async.cg.shared.global [{{$r0}}+{into}], [{{$r1}}+{at}], 16; }}",
        read_only_args=[target, source, Int32(present)],
    )


def await_copies() -> None:
    """Waits until all that this thread has begun to copy is there, for this thread."""
    cute.arch.inline_ptx("cp.async.wait_all;")


def load_shared4(address: Int32, dtype: str, *, at: int) -> tuple:
    """Four channels as float32 from shared memory; `at` is part of the instruction."""
    load = _LOAD4[dtype].format(when="", space="shared", at=at)
    return cute.arch.inline_ptx(f"{{ {load} }}", write_only_types=[Float32] * 4, read_only_args=[address])


def reciprocal(x: Float32) -> Float32:
    """1 / x, off by one unit in the last place at most; a subnormal x counts as 0, which saves a branch."""
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def select(condition: Boolean, yes, no):
    """`yes` where the condition holds, else `no`: two values of one type."""
    return type(yes)(cutlass.select_(condition, yes, no))
