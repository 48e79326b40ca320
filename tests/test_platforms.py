"""The platform switch: what it takes for which op, size and dtype, and on which GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata, platforms

CSA, HCA, INDEXER = CompressorConfig.csa(), CompressorConfig.hca(), CompressorConfig.indexer()
ONLINE = CompressorConfig.hca(state="online")
ALL = ("triton", "jax-triton", "torch", "nvidia-cutlass-dsl")


@pytest.fixture
def machine(monkeypatch):
    """Sets what is installed and the GPU's compute capability (None: no GPU)."""

    def be(packages=ALL, capability="9.0"):
        monkeypatch.setattr(platforms, "installed", lambda package: "1.0" if package in packages else None)
        monkeypatch.setattr(platforms, "_compute_capability", lambda: capability)

    be()
    return be


def choose(config, tokens, dtype="float32", op="compress", platform="cuda", save="tail", prefill=True):
    batch = jax.ShapeDtypeStruct((tokens, 2 * config.width), jnp.dtype(dtype))
    return platforms.choose(op, platform, config, batch, save, prefill)


@pytest.mark.parametrize(
    ("config", "tokens", "taken"),
    [
        (CSA, 1, "triton"), (CSA, 512, "triton"), (CSA, 8191, "triton"),
        (CSA, 8192, "cutedsl"), (CSA, 65536, "cutedsl"),
        (HCA, 511, "triton"), (HCA, 512, "cutedsl"), (HCA, 2048, "cutedsl"), (HCA, 2049, "triton"),
        (HCA, 32767, "triton"), (HCA, 32768, "cutedsl"), (HCA, 65536, "cutedsl"),
        (ONLINE, 2048, "triton"), (ONLINE, 65536, "triton"), (INDEXER, 65536, "triton"),
    ],
)  # fmt: skip
def test_by_compressor_and_size(machine, config, tokens, taken):
    assert choose(config, tokens) == taken


def test_only_what_was_measured_is_taken(machine):
    assert choose(CSA, 65536) == "cutedsl"
    assert choose(CSA, 8191, "bfloat16") == "triton" and choose(CSA, 8192, "bfloat16") == "cutedsl"
    assert choose(HCA, 1024, "bfloat16") == choose(HCA, 65536, "bfloat16") == "cutedsl"
    assert choose(CSA, 65536, save="all") == choose(HCA, 1024, save="all") == "triton"
    assert choose(CSA, 65536, prefill=False) == choose(HCA, 1024, prefill=False) == "triton"
    assert choose(HCA, 1, prefill=False) == choose(HCA, 1, "bfloat16", prefill=False) == "cutedsl"
    assert choose(HCA, 2, prefill=False) == choose(HCA, 1, "float16", prefill=False) == "triton"
    assert choose(CSA, 1, prefill=False) == choose(HCA, 1, save="all", prefill=False) == "triton"
    assert choose(CSA, 65536, op="compress_norm_rope_store") == "triton"
    for capability in ("8.9", "10.0", "12.0", None):
        machine(capability=capability)
        assert choose(CSA, 65536) == "triton"


def test_what_is_not_installed_is_not_taken(machine):
    machine(packages=ALL[:3])
    assert choose(CSA, 65536) == "triton"
    machine(packages=("torch",))
    assert choose(CSA, 65536) == choose(CSA, 64) == "xla"
    machine(packages=("nvidia-cutlass-dsl",))
    assert choose(CSA, 65536) == "cutedsl" and choose(CSA, 64) == "xla"


@pytest.mark.parametrize(("platform", "taken"), [("cpu", "xla"), ("tpu", "xla"), ("rocm", "triton")])
def test_other_platforms(machine, platform, taken):
    assert choose(CSA, 65536, platform=platform) == taken


def test_without_a_batch_small_ones_count(machine):
    assert platforms.choose("compress", "cuda") == platforms.choose("compress", "cuda", CSA) == "triton"


def test_no_gpu_no_capability():
    if jax.default_backend() == "cpu":
        assert platforms._compute_capability() is None


def lowered(tokens, dtype, save="tail"):
    """`compress`, traced for shapes alone, as it is lowered for CUDA."""

    def make():
        metadata = CompressorMetadata.build(
            CSA, jnp.array([0, tokens]), jnp.array([tokens]),
            jnp.zeros((1, tokens // 4), jnp.int32), jnp.zeros((1, tokens // 256), jnp.int32), num_tokens=tokens,
        )  # fmt: skip
        states = jnp.zeros((tokens // 4, 4, 2 * CSA.width))
        kv_score, ape = jnp.zeros((tokens, 2 * CSA.width), dtype), jnp.zeros((4, CSA.width))
        return kv_score, ape, states, CSA.format.allocate(8, 64), metadata, jnp.ones(512), jnp.zeros((tokens, 64))

    call = jax.jit(functools.partial(dsv4_jax.compress, config=CSA, save=save))
    return call.trace(*jax.eval_shape(make)).lower(lowering_platforms=("cuda",)).as_text()


def test_ops_tell_the_switch_their_size_and_dtype(monkeypatch):
    seen = []

    def record(op, platform, config, batch, save, prefill):
        seen.append((op, platform, config, batch.shape, batch.dtype.name, save, prefill))
        return "xla"

    monkeypatch.setattr(platforms, "choose", record)
    lowered(1024, "bfloat16", "all")
    assert seen == [("compress", "cuda", CSA, (1024, 2048), "bfloat16", "all", True)]


def test_a_large_prefill_is_lowered_to_cutedsl(machine, monkeypatch):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from dsv4_jax.nvidia.ops.helpers import launch

    monkeypatch.setattr(launch, "loaded", lambda kernel, shape, arch: None)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    assert lowered(8192, "float32").count("gpu_callback_cmd_buffer") == 1
