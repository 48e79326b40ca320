"""`fused_q_kv_rmsnorm` in Triton: a program normalizes a few rows of q, or a few of kv."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import bf16_bits
from dsv4_jax.common.ops.helpers.rms_norm import rms_norm

TILE = 4096  # channels of a program, of 4 warps: 4 loads of 16 bytes in flight in each thread


def implement(q, kv, q_weight, kv_weight, *, eps, outputs):
    """See `dsv4_jax.fused_q_kv_rmsnorm`."""
    tokens = q.shape[0]
    if tokens == 0:
        return q, kv
    q_block, kv_block = (triton.next_power_of_2(x.shape[1]) for x in (q, kv))
    q_rows, kv_rows = (min(max(1, TILE // block), triton.next_power_of_2(tokens)) for block in (q_block, kv_block))
    q_programs = triton.cdiv(tokens, q_rows)
    return launch(
        _q_kv_norm_kernel,
        q_programs + triton.cdiv(tokens, kv_rows),
        outputs=dict(zip(("q_out", "kv_out"), outputs, strict=True)),
        num_warps=min(16, max(4, max(q_block, kv_block) // 1024)),
        constants={
            "Q_WIDTH": q.shape[1],
            "Q_BLOCK": q_block,
            "Q_ROWS": q_rows,
            "KV_WIDTH": kv.shape[1],
            "KV_BLOCK": kv_block,
            "KV_ROWS": kv_rows,
            "EPS": eps,
        },
        q=q,
        kv=kv,
        q_weight=q_weight,
        kv_weight=kv_weight,
        tokens=tokens,
        q_programs=q_programs,
    )


@triton.jit
def _q_kv_norm_kernel(
    q, kv, q_weight, kv_weight, q_out, kv_out, tokens, q_programs,
    Q_WIDTH: tl.constexpr, Q_BLOCK: tl.constexpr, Q_ROWS: tl.constexpr,
    KV_WIDTH: tl.constexpr, KV_BLOCK: tl.constexpr, KV_ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    if index < q_programs:
        _norm_rows(index, q, q_weight, q_out, tokens, Q_WIDTH, Q_BLOCK, Q_ROWS, EPS)
    else:
        _norm_rows(index - q_programs, kv, kv_weight, kv_out, tokens, KV_WIDTH, KV_BLOCK, KV_ROWS, EPS)


@triton.jit
def _norm_rows(
    index, source, weight, target, tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = index * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * WIDTH + channel
    mask = (row < tokens)[:, None] & (channel < WIDTH)
    scale = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    y = rms_norm(x, scale, EPS, WIDTH)
    if target.dtype.element_ty == tl.bfloat16:
        tl.store(target.to(tl.pointer_type(tl.int16)) + at, bf16_bits(y), mask=mask)
    else:
        tl.store(target + at, y, mask=mask)
