"""Which GPU a program is lowered for, and what follows from it."""

import types

import jax
import pytest

from dsv4_jax import CompressorConfig, api, gpus, platforms
from dsv4_jax.platforms import Target


def under(kind, platform="gpu"):
    device = jax.sharding.AbstractDevice(kind, None, platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), axis_types=(), abstract_device=device))


@pytest.mark.parametrize(
    ("platform", "kind", "arch"),
    [
        ("cuda", "NVIDIA A100-SXM4-80GB", "sm_80"),
        ("cuda", "NVIDIA L4", "sm_89"),
        ("cuda", "NVIDIA H200", "sm_90"),
        ("cuda", "NVIDIA B200", "sm_100"),
        ("cuda", "NVIDIA RTX PRO 6000", "sm_120"),
        ("rocm", "gfx942", "gfx942"),
    ],
)
def test_abstract_device_names_the_arch(platform, kind, arch):
    with under(kind):
        assert gpus.arch(platform) == arch
        assert platforms.target(platform) == Target(platform, arch)


@pytest.mark.parametrize(
    ("platform", "capability", "arch"),
    [("cuda", "9.0", "sm_90"), ("cuda", "12.1", "sm_121"), ("rocm", "gfx942:sramecc+:xnack-", "gfx942")],
)
def test_local_device(monkeypatch, platform, capability, arch):
    device = types.SimpleNamespace(device_kind="a GPU", compute_capability=capability)
    monkeypatch.setattr(gpus, "_local_device", lambda _: device)
    assert gpus.arch(platform) == arch
    with under("a GPU"):  # the mesh of local devices
        assert gpus.arch(platform) == arch
    with under("NVIDIA B200"):
        assert gpus.arch("cuda") == "sm_100"


def test_nothing_says_which(monkeypatch):
    monkeypatch.setattr(gpus, "_local_device", lambda _: None)
    assert gpus.arch("cuda") is None and gpus.arch("rocm") is None
    with under("cpu", "cpu"):
        assert gpus.arch("cuda") is None
    with under("a GPU of another maker"), pytest.raises(ValueError, match="a GPU of another maker"):
        gpus.arch("cuda")


@pytest.mark.parametrize(
    ("arch", "size"), [("sm_90", 32), ("sm_120", 32), ("gfx90a", 64), ("gfx942", 64), ("gfx950", 64), ("gfx1201", 32)]
)
def test_wave_size(arch, size):
    assert gpus.wave_size(arch) == size


def test_rdna_cannot_run_triton():
    assert gpus.why_no_triton("gfx942") is gpus.why_no_triton("sm_90") is None
    assert "waves of 32" in platforms.why_not("triton", Target("rocm", "gfx1201"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_fp8_needs_sm_89(arch):
    target = Target("cuda", arch)
    assert f"from sm_89 on, and this one is {arch}" in gpus.why_no_fp8(arch)
    for able in ("sm_89", "sm_90", "sm_120", "gfx942", "gfx950"):
        assert gpus.why_no_fp8(able) is None
    for config in (CompressorConfig.csa(), CompressorConfig.hca("fp8"), CompressorConfig.indexer()):
        assert "sm_89" in api.compress.OP.why_not("triton", target, config=config, save="tail")
        assert api.compress.OP.why_not("triton", Target("cuda", "sm_89"), config=config, save="tail") is None
    for config in (CompressorConfig.csa("bf16"), CompressorConfig.indexer("indexer_mxfp4")):
        assert api.compress.OP.why_not("triton", target, config=config, save="tail") is None
    assert "sm_89" in api.prepare_megamoe_inputs.OP.why_not("triton", target)
    assert api.save_partial_states.OP.why_not("triton", target) is None
