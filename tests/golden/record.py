"""Records what vLLM's kernels make of the inputs of a golden file: `python tests/golden/record.py OLD.npz NEW.npz`.

Needs vLLM and an NVIDIA GPU. Inputs are copied from OLD, outputs are computed anew, and those that differ from OLD's
are named: of the files beside this script none. For a new case, add its inputs to OLD, and outputs of their shape.

The files here were recorded before this script was in the repository. It is written for the entry points of vLLM 0.33
(`vllm.models.deepseek_v4.common.ops`) as their signatures state them, and has not been run with any vLLM yet.
"""

import sys
import types

import numpy as np
import torch
from vllm.models.deepseek_v4.common import ops
from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton

# Arrays whose dtype .npz does not know: the name's ending, the dtype that holds the bits, and the one that they are of.
STORED = {"bf16": (np.int16, torch.bfloat16), "e4m3fn": (np.uint8, torch.float8_e4m3fn)}
WIDE = ("positions", "slots", "slot_mapping", "kv_slot_mapping")  # vLLM's are int64


def on_gpu(name, array):
    tensor = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    if "__" in name:
        return tensor.view(STORED[name.partition("__")[2]][1])
    return tensor.long() if name in WIDE else tensor


def stored(tensor):
    """A result as NumPy has it, and how its name ends."""
    for ending, (holder, dtype) in STORED.items():
        if tensor.dtype == dtype:
            return tensor.view(torch.from_numpy(np.empty(0, holder)).dtype).cpu().numpy(), f"__{ending}"
    return tensor.cpu().numpy(), ""


def paged(pages, page_rows):
    """Pages `[pages, page_bytes]` as vLLM has them, `[pages, page_rows, row bytes]` with the stride of a page."""
    count, size = pages.shape
    return pages.as_strided((count, page_rows, size // page_rows), (size, size // page_rows, 1))


def compressor(a):
    """The steps one after the other: states saved, then windows compressed."""
    head_dim, ratio, page_rows, kv_page_rows, page_bytes, pages = a["meta"].tolist()
    width = a["kv_score"].shape[1] // 2
    state, cache = a["state_before"].float(), torch.full((pages, page_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    shared = {"positions": a["positions"], "slot_mapping": a["slot_mapping"], "block_size": page_rows}
    shared |= {"state_cache": state, "state_width": width, "compress_ratio": ratio, "pdl_kwargs": {"launch_pdl": False}}
    kv, score = a["kv_score"].float().split(width, dim=1)
    ops.save_partial_states(kv=kv, score=score, ape=a["ape"].float(), **shared)
    values, scales, block = (576, 8, 64) if head_dim == 512 else (128, 4, 128)
    compress_norm_rope_store_triton(
        **shared,
        num_actual=len(a["positions"]),
        token_to_req_indices=a["token_to_req"],
        block_table=a["block_table"],
        cos_sin_cache=a["cos_sin"],
        kv_cache=paged(cache, kv_page_rows),
        k_cache_metadata=types.SimpleNamespace(slot_mapping=a["kv_slot_mapping"]),
        head_dim=head_dim,
        rope_head_dim=64,
        overlap=ratio == 4,
        use_fp4_cache=False,
        rms_norm_weight=a["norm_weight"],
        rms_norm_eps=1e-6,
        quant_block=block,
        token_stride=values,
        scale_dim=scales,
    )
    slots = a["slot_mapping"][a["slot_mapping"] >= 0]
    return {"kv_after_triton": cache, "state_rows_after": state.flatten(0, 1)[slots]}


def quantize_insert(a):
    page_rows, page_bytes, pages = a["meta"].tolist()
    cache = torch.full((pages, page_bytes), 0xA5, dtype=torch.uint8, device="cuda")
    ops.quantize_and_insert_k_cache(a["k"], cache, a["slots"], block_size=page_rows)
    return {"cache": cache}


def dequant_gather(a):
    page_rows, offset = a["meta"].tolist()
    # What no row is gathered into stays as it is, and `out` began as zeros.
    out = torch.zeros_like(a["out"])
    lens = a["gather_lens"] if len(a["gather_lens"]) else None
    cache = paged(a["cache"], page_rows)
    ops.dequantize_and_gather_k_cache(out, cache, a["seq_lens"], lens, a["block_table"], page_rows, offset)
    return {"out": out}


def global_topk(a):
    page_rows = int(a["meta"])
    out = ops.compute_global_topk_indices_and_lens(a["topk"], a["req"], a["block_table"], page_rows, a["valid"])
    return dict(zip(("out", "lens"), out, strict=True))


def combine_topk_swa(a):
    arrays = (a[name] for name in ("topk", "query_start_loc", "seq_lens", "gather_lens"))
    return dict(zip(("out", "lens"), ops.combine_topk_swa_indices(*arrays, *a["meta"].tolist()), strict=True))


def indexer_q_fp8(a):
    arrays = (a[name] for name in ("positions", "q", "cos_sin", "weights"))
    out = ops.fused_indexer_q_rope_quant(*arrays, 128**-0.5, 64**-0.5)
    return dict(zip(("out", "weights_out"), out, strict=True))


def inv_rope(a):
    arrays = (a[name] for name in ("o", "positions", "cos_sin"))
    packed = a["scales"].dtype == torch.int32
    out = ops.fused_inv_rope_fp8_quant(*arrays, *a["meta"].tolist(), tma_aligned_scales=packed)
    return dict(zip(("out", "scales"), out, strict=True))


def main(old, new):
    with np.load(old) as archive:
        arrays = dict(archive)
    companions = (quantize_insert, dequant_gather, global_topk, combine_topk_swa, indexer_q_fp8, inv_rope)
    run = {f.__name__: f for f in companions} | dict.fromkeys(("csa", "hca", "indexer_fp8"), compressor)
    differing = 0
    for case in sorted({name.rpartition("/")[0] for name in arrays}):
        names = [name.rpartition("/")[2] for name in arrays if name.startswith(case + "/")]
        given = {name.partition("__")[0]: on_gpu(name, arrays[f"{case}/{name}"]) for name in names}
        for name, tensor in run[case.partition("/")[0]](given).items():
            array, ending = stored(tensor)
            path = f"{case}/{name}{ending}"
            if name == "state_rows_after" and path not in arrays:
                continue  # kept for two cases only
            if not np.array_equal(array, arrays[path]):
                differing += 1
                print(f"{path} differs from {old}")
            arrays[path] = array
    np.savez_compressed(new, **arrays)
    print(f"{new}: {len(arrays)} arrays, {differing} of them not as before")


if __name__ == "__main__":
    main(*sys.argv[1:])
