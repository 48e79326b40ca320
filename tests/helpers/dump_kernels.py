"""Writes the machine code of every Triton kernel, as the ops launch it, for one GPU target; needs no GPU.

`python tests/helpers/dump_kernels.py cuda 90 FOLDER` writes PTX (for `hip gfx942 FOLDER`, AMD's assembly), without
debug information: a file per launch, named after the case and the kernel. A change that must not touch the code is
checked by two folders, made before and after it:

`python tests/helpers/dump_kernels.py compare BEFORE AFTER` prints the files that differ, and fails if any do.

Run it without TRITON_INTERPRET.
"""

import itertools
import os
import pathlib
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TRITON_DISABLE_LINE_INFO": "1"}

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import dsv4_jax
from dsv4_jax import CACHE_FORMATS, CompressorConfig, CompressorMetadata
from dsv4_jax.common.ops.helpers.launch import launching_with

TYPES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "uint8": "u8", "float8_e4m3fn": "fp8e4nv", "bool": "i1"}
TARGETS = {"cuda": "ptx", "hip": "amdgcn"}
WARP = {"90": 32, "100": 32, "gfx942": 64, "gfx950": 64, "gfx1201": 32}
FLOATS = jnp.float32, jnp.bfloat16


def dump(backend: str, arch: str, folder: pathlib.Path) -> None:
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, WARP[arch])
    folder.mkdir(parents=True, exist_ok=True)
    compiled, files = {}, 0
    for case, call in _cases():
        for kernel, names, out_type, constants, num_warps in _launches(call):
            source = _source(kernel, names, out_type, constants)
            key = kernel.__name__, tuple(source.signature.items()), tuple(source.constants.items()), num_warps
            if key not in compiled:
                binary = triton.compile(source, target=target, options={"num_warps": num_warps})
                compiled[key] = binary.asm[TARGETS[backend]]
            (folder / f"{case}.{kernel.__name__}.txt").write_text(compiled[key])
            files += 1
    print(f"{files} launches, {len(compiled)} kernels")


def _launches(call) -> list:
    """What an op hands to jax-triton when it is lowered for CUDA."""
    launches = []

    def record(kernel, grid, updates, outputs, num_warps, constants, args):
        launches.append((kernel, args, tuple(outputs.values()), constants, num_warps))
        return tuple(args[name] for name in updates) + tuple(jnp.zeros(o.shape, o.dtype) for o in outputs.values())

    with launching_with(record):
        jax.jit(call).trace().lower(lowering_platforms=("cuda",))
    return launches


def _source(kernel, named, out_type, constants) -> ASTSource:
    """The kernel specialized as jax-triton does: arrays are aligned; an integer that is 1, and None, are constants."""
    constants = constants | {n: v for n, v in named.items() if v is None or (isinstance(v, int) and v == 1)}
    outputs = iter(out_type)
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(named.get(name), int):
            signature[name] = "i32"
        else:
            array = named[name] if name in named else next(outputs)
            signature[name] = "*" + TYPES[array.dtype.name]
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def _cases():
    """Calls of public functions, each with a name."""
    yield from _compressors()
    yield from _online()
    yield from _topk_indices()
    yield from _megamoe()
    yield from _heads()
    yield from _norms()
    yield from _caches()


def _compressors():
    for kind, formats in (
        ("csa", ("fp8_ds_mla", "bf16", "fp8")),
        ("hca", ("fp8_ds_mla", "bf16", "fp8")),
        ("indexer", ("indexer_fp8", "indexer_mxfp4")),
    ):
        for fmt, dtype in itertools.product(formats, FLOATS):
            config, name = getattr(CompressorConfig, kind)(fmt), f"{kind}-{fmt}-{dtype.__name__}"
            yield from _compressor(f"{name}", config, dtype)
            if fmt == formats[0]:
                yield from _compressor(f"{name}-all", config, dtype, save="all")
                # A prefill, batches of a few tokens a request and decodes have kernels of their own.
                yield from _compressor(f"{name}-few", config, dtype, requests=128)
                yield from _compressor(f"{name}-decode", config, dtype, requests=256)
                yield from _compressor(f"{name}-ones", config, dtype, tokens=1, pages=1)
    for width in (16, 768, 1000):
        i32, rows = jnp.zeros(4, jnp.int32), jnp.zeros((4, width))
        args = rows, rows, rows, i32, jnp.zeros((2, 4, 2 * width)), i32
        yield f"save-{width}", _op("save_partial_states", *args, compress_ratio=4)


def _compressor(name, config, dtype, *, tokens=256, requests=1, pages=8, save="tail"):
    kv_score = jnp.zeros((tokens, 2 * config.width), dtype)
    ape = jnp.zeros((config.compress_ratio, config.width))
    states = jnp.zeros((pages, config.page_rows, config.state_width))
    cache = config.format.allocate(pages, config.kv_page_rows)
    norm, cos_sin = jnp.ones(config.head_dim, dtype), jnp.zeros((tokens, 64))
    rest = {"config": config, "kv_scale": 1.0 if config.format.needs_scale else None}
    metadata = _metadata(config, tokens, requests)
    if config.state == "rows":
        kv, score = jnp.split(kv_score, 2, axis=1)
        saved = kv, score, ape, metadata.positions, states, metadata.slot_mapping
        yield f"{name}-save", _op("save_partial_states", *saved, compress_ratio=config.compress_ratio)
        yield f"{name}-store", _op("compress_norm_rope_store", states, cache, metadata, norm, cos_sin, **rest)
    yield (
        f"{name}-compress",
        _op("compress", kv_score, ape, states, cache, metadata, norm, cos_sin, save=save, **rest),
    )


def _metadata(config, tokens, requests):
    return CompressorMetadata.build(
        config,
        jnp.arange(requests + 1),
        jnp.ones(requests, jnp.int32),
        jnp.zeros((requests, 1 if config.state == "online" else -(-tokens // config.page_rows)), jnp.int32),
        jnp.zeros((requests, 8), jnp.int32),
        num_tokens=tokens,
    )


def _online():
    """A short batch, of a page's rows per request, and long ones."""
    for (fmt, page_rows), dtype in itertools.product((("fp8_ds_mla", 1), ("bf16", 4)), FLOATS):
        config = CompressorConfig.hca(fmt, page_rows=page_rows, state="online")
        name = f"online-{fmt}-{dtype.__name__}"
        yield from _compressor(f"{name}-walk", config, dtype, tokens=2 * page_rows, requests=2)
        yield from _compressor(f"{name}-long", config, dtype, requests=2)
        yield from _compressor(f"{name}-walk-ones", config, dtype, tokens=1, pages=1)
        yield from _compressor(f"{name}-long-ones", config, dtype, tokens=page_rows + 1, pages=1)


def _topk_indices():
    i32 = lambda *shape: jnp.zeros(shape, jnp.int32)
    for topk, tokens in itertools.product((3, 512, 2048), (9, 1)):
        arrays = i32(tokens, topk), i32(tokens), i32(2, 5 if tokens > 1 else 1)
        valid = jnp.zeros(tokens, bool)
        yield f"global-{topk}-{tokens}", _op("compute_global_topk_indices_and_lens", *arrays, 64, valid)
        for used in (0, topk):
            arrays = i32(tokens, topk), i32(3), i32(2), i32(2), 128, 4, used, 100, 60
            yield f"combine-{topk}-{used}-{tokens}", _op("combine_topk_swa_indices", *arrays)


def _megamoe():
    for padded, tokens in itertools.product((False, True), (9, 1)):
        hidden, ids = jnp.zeros((tokens, 4096), jnp.bfloat16), jnp.zeros((tokens, 6), jnp.int32)
        padding = jnp.zeros(tokens, bool) if padded else None
        args = hidden, jnp.zeros((tokens, 6)), ids, padding
        yield f"megamoe-{padded}-{tokens}", _op("prepare_megamoe_inputs", *args)


def _heads():
    """The ops that rotate and quantize the heads of queries and of attention's output."""
    for tokens, rows in ((9, 20), (1, 1)):
        positions, cos_sin = jnp.zeros(tokens, jnp.int32), jnp.zeros((rows, 64))
        for heads, dtype, use_fp4 in ((64, jnp.bfloat16, False), (64, jnp.bfloat16, True), (3, jnp.float32, False)):
            q, weights = jnp.zeros((tokens, heads, 128), dtype), jnp.zeros((tokens, heads), dtype)
            args = positions, q, cos_sin, weights, 128**-0.5, heads**-0.5, use_fp4
            yield f"q-{heads}-{use_fp4}-{tokens}", _op("fused_indexer_q_rope_quant", *args)
        for heads, packed, size in ((64, False, 128), (64, True, 128), (6, True, 32)):
            o = jnp.zeros((tokens, heads, 512), jnp.bfloat16)
            for quantize in (True, False):
                args = o, positions, cos_sin, heads // 2, 2, size, packed, quantize
                name = f"inv-rope-{heads}-{packed}-{quantize}-{tokens}"
                yield name, _op("fused_inv_rope_fp8_quant", *args)


def _norms():
    """The RMSNorms of q and kv; heads normalized and rotated, keys stored."""
    for dtype, tokens, widths in (
        (jnp.bfloat16, 9, (1024, 512)),
        (jnp.bfloat16, 9, (1536, 512)),
        (jnp.float32, 9, (1536, 512)),
        (jnp.bfloat16, 1, (1000, 5000)),
    ):
        arrays = *(jnp.zeros((tokens, w), dtype) for w in widths), *(jnp.ones(w) for w in widths)
        yield f"norms-{dtype.__name__}-{widths[0]}", _op("fused_q_kv_rmsnorm", *arrays)
    for (fmt, heads, padded), (tokens, pages) in itertools.product(
        (("fp8_ds_mla", 64, 64), ("bf16", 3, 11), ("fp8", 128, 128)), ((9, 8), (1, 1))
    ):
        q, kv = jnp.zeros((tokens, heads, 512), jnp.bfloat16), jnp.zeros((tokens, 512), jnp.bfloat16)
        cache, indices = CACHE_FORMATS[fmt].allocate(pages, 64), jnp.zeros(tokens, jnp.int32)
        options = {"padded_heads": padded, "cache_format": fmt, "page_rows": 64}
        args = q, kv, cache, indices, indices, jnp.zeros((20 if pages > 1 else 1, 64))
        options["kv_scale"] = 1.0 if fmt == "fp8" else None
        yield f"qnorm-{fmt}-{tokens}", _op("fused_qnorm_rope_kv_rope_quant_insert", *args, **options)


def _caches():
    """Keys into a cache and out of it; a page of rows that 4-byte alignment alone allows, too."""
    i32 = lambda *shape: jnp.zeros(shape, jnp.int32)
    for (name, fmt), (page_rows, dtype, tokens, pages) in itertools.product(
        CACHE_FORMATS.items(), ((64, jnp.bfloat16, 9, 8), (3, jnp.float32, 9, 8), (64, jnp.bfloat16, 1, 1))
    ):
        rest = {"kv_scale": 1.0 if fmt.needs_scale else None, "cache_format": name, "page_rows": page_rows}
        cache = fmt.allocate(pages, page_rows, page_bytes=page_rows * fmt.row_bytes if fmt.packed else None)
        case = f"{name}-{page_rows}-{tokens}"
        k = jnp.zeros((tokens, fmt.head_dim), dtype)
        yield f"insert-{case}", _op("quantize_and_insert_k_cache", k, cache, i32(tokens), **rest)
        out = jnp.zeros((2, 300 if tokens > 1 else 1, fmt.head_dim), jnp.bfloat16)
        args = cache, i32(2), i32(2, 5 if pages > 1 else 1), i32(2), 0
        yield f"gather-{case}", _op("dequantize_and_gather_k_cache", *args, out=out, **rest)


def _op(name, *args, **options):
    return lambda: getattr(dsv4_jax, name)(*args, implementation="triton", **options)


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints what differs; returns how many files do."""
    names = sorted({path.name for folder in (before, after) for path in folder.iterdir()})
    texts = [[_body(f / name) if (f / name).exists() else None for f in (before, after)] for name in names]
    different = [name for name, (old, new) in zip(names, texts, strict=True) if old != new]
    print(*different, f"{len(names) - len(different)} of {len(names)} are equal", sep="\n")
    return len(different)


def _body(path: pathlib.Path) -> str:
    """PTX without the list of parameters, which are numbered in the order of their use: unused ones do not count."""
    text, order = re.sub(r"^\s*\.param .*\n", "", path.read_text(), flags=re.MULTILINE), {}
    return re.sub(r"_param_(\d+)", lambda m: f"_param_{order.setdefault(m[1], len(order))}", text)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        sys.exit(compare(*map(pathlib.Path, sys.argv[2:])) > 0)
    dump(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
