"""The platform switch: what it takes for which op, size and dtype, and on which GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata, platforms
from dsv4_jax.api import compress, compress_norm_rope_store
from dsv4_jax.platforms import Target

CSA, HCA, INDEXER = CompressorConfig.csa(), CompressorConfig.hca(), CompressorConfig.indexer()
ONLINE = CompressorConfig.hca(state="online")
ALL = ("triton", "jax-triton", "torch", "nvidia-cutlass-dsl")
H200 = Target("cuda", "sm_90")


@pytest.fixture
def machine(monkeypatch):
    """Sets what is installed."""

    def be(packages=ALL):
        monkeypatch.setattr(platforms, "installed", lambda package: "9.0" if package in packages else None)
        monkeypatch.setattr(platforms, "_cutlass_import_error", lambda: None)

    be()
    return be


def choose(config, tokens, *, target=H200, save="tail", requests=1):
    """What the switch takes for `compress` of a batch whose tokens are those of so many requests."""
    arguments = jax.eval_shape(functools.partial(make, config, tokens, "float32", requests))
    return compress.OP.choose(target, *arguments, None, config=config, save=save)


def make(config, tokens, dtype, requests=1):
    columns = 1 if config.state == "online" else -(-tokens // config.page_rows)
    metadata = CompressorMetadata.build(
        config, jnp.arange(requests + 1), jnp.ones(requests, jnp.int32), jnp.zeros((requests, columns), jnp.int32),
        jnp.zeros((requests, 1), jnp.int32), num_tokens=tokens,
    )  # fmt: skip
    states = jnp.zeros((8, config.page_rows, config.state_width))
    kv_score, ape = jnp.zeros((tokens, 2 * config.width), dtype), jnp.zeros((config.compress_ratio, config.width))
    cache = config.format.allocate(8, config.kv_page_rows)
    return kv_score, ape, states, cache, metadata, jnp.ones(config.head_dim), jnp.zeros((tokens, 64))


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
    assert choose(CSA, 65536, save="all") == choose(HCA, 1024, save="all") == "triton"
    # Decodes: one token a request.
    assert choose(CSA, 16384, requests=16384) == choose(HCA, 1024, requests=1024) == "triton"
    assert choose(HCA, 1) == choose(HCA, 2, requests=2) == choose(CSA, 1) == "triton"
    for arch in ("sm_89", "sm_100", "sm_120", None):
        assert choose(CSA, 65536, target=Target("cuda", arch)) == "triton"
    assert compress_norm_rope_store.OP.choose(H200, config=CSA) == "triton"


def test_what_is_not_installed_is_not_taken(machine):
    machine(packages=ALL[:3])
    assert choose(CSA, 65536) == "triton"
    machine(packages=("torch",))
    assert choose(CSA, 65536) == choose(CSA, 64) == "xla"
    machine(packages=("nvidia-cutlass-dsl", "torch"))
    assert choose(CSA, 65536) == "cutedsl" and choose(CSA, 64) == "xla"


@pytest.mark.parametrize(("platform", "taken"), [("cpu", "xla"), ("tpu", "xla"), ("rocm", "triton")])
def test_other_platforms(machine, platform, taken):
    assert choose(CSA, 65536, target=Target(platform)) == taken


def test_an_old_triton_is_not_taken(monkeypatch):
    monkeypatch.setattr(platforms, "installed", lambda package: "3.7.1")
    assert "triton 3.7.1 is installed; the kernels need 3.8" in compress.OP.why_not("triton", H200)
    assert choose(CSA, 64) == "xla"


def test_without_a_batch_small_ones_count(machine):
    assert compress.OP.choose(H200) == "triton"


def test_no_gpu_no_arch():
    if jax.default_backend() == "cpu":
        assert platforms.target("cuda") == Target("cuda", None)


@pytest.mark.parametrize(
    ("arch", "why"), [("sm_90", None), ("sm_100", None), ("sm_120", None), ("sm_89", "this one is sm_89")]
)
def test_cutedsl_needs_clusters(machine, arch, why):
    said = compress.OP.why_not("cutedsl", Target("cuda", arch), config=CSA, save="tail")
    assert said is None if why is None else why in said and "'triton'" in said


def lowered(tokens, dtype, save="tail"):
    """`compress`, traced for shapes alone, as it is lowered for CUDA."""
    call = jax.jit(functools.partial(dsv4_jax.compress, config=CSA, save=save))
    arguments = jax.eval_shape(functools.partial(make, CSA, tokens, dtype))
    return call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_ops_tell_the_switch_their_size_and_dtype(monkeypatch):
    seen = []

    def record(target, kv_score, *args, config, save):
        seen.append((target.platform, config, kv_score.shape, kv_score.dtype.name, save))
        return "xla"

    monkeypatch.setattr(compress.OP, "choose", record)
    lowered(1024, "bfloat16", "all")
    assert seen == [("cuda", CSA, (1024, 2048), "bfloat16", "all")]


def test_a_large_prefill_is_lowered_to_cutedsl(machine, monkeypatch):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from dsv4_jax.nvidia.ops.helpers import launch

    monkeypatch.setattr(launch, "load_kernel", lambda kernel, shape, arch: None)
    monkeypatch.setattr(platforms, "target", lambda platform: H200)
    assert lowered(8192, "float32").count("gpu_callback_cmd_buffer") == 1
