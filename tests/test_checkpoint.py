"""`load_compressors`: names, files, dtypes, errors; and a checkpoint by transformers, its outputs against ours."""

import itertools
import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_huggingface as hf
from helpers.serving import Server

from dsv4_jax import CompressorConfig, load_compressors
from dsv4_jax.checkpoint import Checkpoint

safetensors = pytest.importorskip("safetensors.torch")
torch = hf.torch

HIDDEN = 24
CSA, HCA = 1, 2
CONFIGS = ((), (CompressorConfig.csa(), CompressorConfig.indexer()), (CompressorConfig.hca(),))
# Prefix of a layer's compressor, of its indexer's, and the tensors' names.
STYLES = {
    "deepseek": ("layers.{}.attn.compressor", "layers.{}.attn.indexer.compressor", "wkv", "wgate", "ape", "norm"),
    "transformers": (  # as save_pretrained writes it
        "model.layers.{}.attn.compressor", "model.layers.{}.attn.indexer.compressor", "wkv", "wgate", "ape", "norm",
    ),
    "hugging_face": (
        "model.layers.{}.self_attn.compressor", "model.layers.{}.self_attn.compressor.indexer",
        "kv_proj", "gate_proj", "position_bias", "kv_norm",
    ),
    "vllm": (
        "model.layers.{}.attn.compressor", "model.layers.{}.attn.indexer.compressor",
        "fused_wkv_wgate", None, "ape", "norm",
    ),
}  # fmt: skip


def weights(config, seed, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    m, d, w = config.compress_ratio, config.head_dim, config.width
    return {name: torch.randn(shape, generator=generator) for name, shape in
            {"kv": (w, hidden), "gate": (w, hidden), "ape": (m, w), "norm": (d,)}.items()}  # fmt: skip


def tensors(style="deepseek", dtype=torch.float32, hidden=HIDDEN):
    """All compressors under a style's names, and tensors that are none of the loader's business."""
    main, indexer, kv, gate, ape, norm = STYLES[style]
    found = {
        "model.layers.1.self_attn.kv_norm.weight": torch.zeros(3),
        "mtp.layers.1.attn.compressor.ape": torch.zeros(3),
    }
    for layer, configs in enumerate(CONFIGS):
        for i, config in enumerate(configs):
            prefix, w = (indexer if i else main).format(layer), weights(config, 10 * layer + i, hidden)
            pair = {kv: torch.cat([w["kv"], w["gate"]])} if gate is None else {kv: w["kv"], gate: w["gate"]}
            for name, weight in {**pair, norm: w["norm"]}.items():
                found[f"{prefix}.{name}.weight"] = weight.to(dtype)
            found[f"{prefix}.{ape}"] = w["ape"]
    return found


def write(path, found, *, shards=1, index=False):
    path.mkdir(exist_ok=True)
    names, weight_map = sorted(found), {}
    for i in range(shards):
        file = f"model-{i}.safetensors"
        safetensors.save_file({name: found[name] for name in names[i::shards]}, path / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def check(loaded, dtype=torch.float32):
    for layer, configs in enumerate(CONFIGS):
        assert [c.config for c in loaded[layer]] == list(configs)
        for i, compressor in enumerate(loaded[layer]):
            w = weights(configs[i], 10 * layer + i)
            want = torch.cat([w["kv"], w["gate"]]).to(dtype).float().numpy().T
            np.testing.assert_array_equal(compressor.wkv_gate.get_value(), want)
            np.testing.assert_array_equal(compressor.ape.get_value(), w["ape"].numpy())
            np.testing.assert_array_equal(compressor.norm.get_value(), w["norm"].to(dtype).float().numpy())
            assert compressor.ape.get_value().dtype == compressor.norm.get_value().dtype == jnp.float32


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_styles_and_dtypes(style, dtype, tmp_path):
    path = write(tmp_path / "model", tensors(style, dtype), shards=2)
    check(load_compressors(path, configs=CONFIGS), dtype)


def test_bfloat16_parameters(tmp_path):
    path = write(tmp_path / "model", tensors())
    loaded = load_compressors(path / "model-0.safetensors", [CSA], configs=CONFIGS, dtype=jnp.bfloat16)
    assert list(loaded) == [CSA]
    for i, compressor in enumerate(loaded[CSA]):
        w = weights(CONFIGS[CSA][i], 10 + i)
        want = torch.cat([w["kv"], w["gate"]]).bfloat16().float().numpy().T
        assert compressor.wkv_gate.get_value().dtype == jnp.bfloat16
        np.testing.assert_array_equal(compressor.wkv_gate.get_value().astype(jnp.float32), want)


def test_opens_only_the_files_it_needs(tmp_path):
    """With an index, a shard that is not there does no harm if nothing of it is wanted."""
    found = tensors()
    path = write(tmp_path / "model", found)
    index = {name: "gone.safetensors" if ".2." in name else "model-0.safetensors" for name in found}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert len(load_compressors(path, [0, CSA], configs=CONFIGS)[CSA]) == 2
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        load_compressors(path, configs=CONFIGS)
    name = Checkpoint(path).compressors[CSA, False]["kv"]
    mapped = Checkpoint(path).tensor(name).map()
    assert isinstance(mapped.base.base, np.memmap) or isinstance(mapped.base, np.memmap)


def test_config_beside_the_weights(tmp_path):
    path = write(tmp_path / "model", tensors(), shards=2, index=True)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_compressors(path)
    (path / "config.json").write_text(json.dumps(hf.hugging_face_config().to_dict()))
    check(load_compressors(path))
    bf16 = CompressorConfig.from_pretrained_config(path, csa_format="bf16")
    assert load_compressors(path, [CSA], configs=bf16)[CSA][0].config.cache_format == "bf16"


def quantized(weight, size, dtype):
    """fp8 values and scales of size x size blocks, and what they stand for; NumPy's own derivation."""
    rows, columns = weight.shape
    values, want = np.zeros((rows, columns), ml_dtypes.float8_e4m3fn), np.zeros((rows, columns), np.float32)
    scale = np.zeros((-(-rows // size), -(-columns // size)), dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = np.s_[size * i : size * (i + 1), size * j : size * (j + 1)]
            s = np.abs(weight[block]).max() / 448
            scale[i, j] = 2 ** np.ceil(np.log2(s)) if dtype == ml_dtypes.float8_e8m0fnu else s
            s = np.float32(scale[i, j])
            values[block] = (weight[block] / s).astype(ml_dtypes.float8_e4m3fn)
            want[block] = values[block].astype(np.float32) * s
    return values, scale, want


@pytest.mark.parametrize(
    ("style", "scales", "size", "dtype"),
    [
        ("deepseek", "scale", 128, ml_dtypes.float8_e8m0fnu),
        ("deepseek", "weight_scale_inv", 128, np.float32),
        ("vllm", "weight_scale_inv", 32, np.float32),
        ("vllm", "weight_scale", 128, ml_dtypes.bfloat16),
        ("deepseek", "weight_scale", 32, np.float16),
        ("deepseek", "scale", 32, ml_dtypes.float8_e8m0fnu),
    ],
)
def test_fp8_weights(style, scales, size, dtype, tmp_path):
    """Blocks at the ragged edge have a scale of their own."""
    found = tensors(style, hidden=300)
    want = {}
    for name in [n for n in found if n.endswith(("wkv.weight", "wgate.weight"))]:
        weight = found[name].numpy() * np.exp(np.random.default_rng(0).standard_normal((len(found[name]), 1)) * 3)
        values, scale, want[name] = quantized(weight.astype(np.float32), size, dtype)
        found[name] = torch.tensor(values.view(np.uint8)).view(torch.float8_e4m3fn)
        bits = torch.tensor(scale.view(f"u{scale.itemsize}"))
        kinds = {"float8_e8m0fnu": torch.float8_e8m0fnu, "float32": torch.float32, "float16": torch.float16}
        found[name.removesuffix("weight") + scales] = bits.view(kinds.get(scale.dtype.name, torch.bfloat16))
    path = write(tmp_path / "model", found, shards=2, index=True)
    loaded = load_compressors(path, configs=CONFIGS)
    for layer, configs in enumerate(CONFIGS):
        for i in range(len(configs)):
            prefix = STYLES[style][1 if i else 0].format(layer)
            parts = ["fused_wkv_wgate"] if style == "vllm" else ["wkv", "wgate"]
            whole = np.concatenate([want[f"{prefix}.{part}.weight"] for part in parts]).T
            np.testing.assert_array_equal(loaded[layer][i].wkv_gate.get_value(), whole)


KV = "layers.1.attn.compressor.wkv.weight"
FP8 = torch.zeros(1024, HIDDEN).to(torch.float8_e4m3fn)
INDEXER = "layers.1.attn.indexer.compressor"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({KV: None}, "layer 1's compressor has no tensor wkv.weight or kv_proj.weight"),
        ({f"{INDEXER}.norm.weight": None}, "layer 1's indexer has no tensor norm.weight or kv_norm.weight"),
        ({KV: torch.zeros(1024, HIDDEN + 1)}, rf"wgate\.weight has shape \[1024, {HIDDEN}\]; it must be \[1024, 25\]"),
        (
            {KV: torch.zeros(512, HIDDEN)},
            r"model-0\.safetensors: .*wkv\.weight has shape \[512, 24\]; .* \[1024, any\]",
        ),
        ({KV: torch.zeros(1024, 0)}, r"wkv\.weight has shape \[1024, 0\]"),
        ({f"{INDEXER}.ape": torch.zeros(4, 128)}, r"ape has shape \[4, 128\]; it must be \[4, 256\]"),
        ({f"{INDEXER}.ape": torch.zeros(4, 256, dtype=torch.int8)}, "ape has dtype I8; it must be F32 or F16 or BF16"),
        ({KV: FP8}, "wkv.weight has dtype F8_E4M3 and no scales beside it; it must have one of .*wkv.weight_scale_inv"),
        (
            {KV: FP8, KV + "_scale_inv": torch.zeros(8, 2)},
            r"weight_scale_inv has shape \[8, 2\]; it must be \[8, 1\] \(blocks of 128 x 128\) or \[32, 1\]",
        ),
        ({KV: FP8, KV + "_scale": torch.zeros(1024, 1)}, r"weight_scale has shape \[1024, 1\]; it must be \[8, 1\]"),
        ({KV: FP8, KV + "_scale": torch.zeros(1)}, r"weight_scale has shape \[1\]; it must be \[8, 1\]"),
        (
            {KV: FP8, KV + "_scale": torch.zeros(8, 1), KV + "_scale_inv": torch.zeros(8, 1)},
            "F8_E4M3 and .*wkv.weight_scale_inv and .*wkv.weight_scale beside it; it must have one",
        ),
        ({KV: FP8, KV + "_scale": torch.zeros(8, 1).int()}, "weight_scale has dtype I32; it must be F32"),
        ({KV: FP8.to(torch.float8_e5m2), KV + "_scale": torch.zeros(8, 1)}, "wkv.weight has dtype F8_E5M2; it must be"),
        (
            {KV: None, KV + "_packed": torch.zeros(1024, 3, dtype=torch.int32)},
            r"has no tensor wkv.weight or kv_proj.weight; it has .*compressor\.wkv\.weight_packed",
        ),
        ({"model." + KV: torch.zeros(1024, HIDDEN)}, "has both"),
    ],
)
def test_bad_tensors(change, says, tmp_path):
    found = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    path = write(tmp_path / "model", found)
    with pytest.raises(ValueError, match=says) as error:
        load_compressors(path, configs=CONFIGS)
    assert str(tmp_path) in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        load_compressors(tmp_path / "none", configs=CONFIGS)
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        load_compressors(tmp_path, configs=CONFIGS)
    path = write(tmp_path / "model", tensors())
    with pytest.raises(ValueError, match="layers are 0 to 2"):
        load_compressors(path, [3], configs=CONFIGS)
    file = path / "model-0.safetensors"
    whole = file.read_bytes()
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}'
    for content in (b"", b"\0", whole[:100], whole[:-1], struct.pack("<Q", 2) + b"[]", b"\xff" * 64,
                    struct.pack("<Q", len(header)) + header + bytes(8)):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model-0\.safetensors cannot be read as safetensors"):
            load_compressors(path, configs=CONFIGS)
    for content in ("[]", "{", '{"weight_map": 3}'):
        (path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is not an index"):
            load_compressors(path, configs=CONFIGS)
    file.write_bytes(whole)
    index = dict.fromkeys([*tensors(), "layers.4.attn.compressor.ape"], "model-0.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"has no tensor layers\.4\.attn\.compressor\.ape, which the index says"):
        Checkpoint(path).tensor("layers.4.attn.compressor.ape")


def test_a_tensor_in_two_files(tmp_path):
    path = write(tmp_path / "model", tensors())
    for name in (KV, "lm_head.weight"):
        other = path / "copy.safetensors"
        safetensors.save_file({name: torch.ones(2)}, other)
        if name != KV:
            safetensors.save_file(tensors() | {name: torch.ones(2)}, path / "model-0.safetensors")
        with pytest.raises(ValueError, match=rf"copy\.safetensors and .*model-0\.safetensors both have {name}"):
            load_compressors(path, configs=CONFIGS)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "model-0.safetensors")}))
    check(load_compressors(path, configs=CONFIGS))
    index.write_text('{"weight_map": {"a": "model-0.safetensors", "a": "copy.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json is not an index .*a stands in it twice"):
        load_compressors(path, configs=CONFIGS)
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
    header += b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    file = tmp_path / "twice.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match="cannot be read as safetensors: a stands in it twice"):
        load_compressors(file, configs=CONFIGS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model by transformers, and what we load from where it saved itself."""
    torch.manual_seed(0)
    model = hf.transformers.AutoModelForCausalLM.from_config(hf.hugging_face_config()).float().eval()
    attention = {layer: model.model.layers[layer].self_attn.compressor for layer in (CSA, HCA)}
    with torch.no_grad():
        for compressor in attention.values():
            for name, weight in compressor.named_parameters():
                torch.nn.init.normal_(weight)
                if name.endswith("kv_norm.weight"):
                    weight.mul_(0.2).add_(1)
                elif name.endswith("proj.weight"):
                    weight.mul_(2 * hf.HIDDEN**-0.5)  # scores far enough apart that the softmax chooses
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return attention, load_compressors(path)


@torch.no_grad()
def hugging_face_keys(compressor, layer, part, hidden, cuts):
    cache = hf.transformers.DynamicCache(config=hf.hugging_face_config())
    hidden = torch.tensor(hidden)[None]
    residual = torch.zeros(1, hidden.shape[1], hf.RANK)
    for a, b in itertools.pairwise(sorted({0, *cuts, hidden.shape[1]})):
        compressor(hidden[:, a:b], residual[:, a:b], torch.arange(a, b)[None], cache, layer)
    name = "indexer" if part else "compressor"
    return cache.layers[layer].compressed_kv[name][0].numpy()


# Where each request's prefill is cut; what is left after the last cut comes token by token, beside the others.
CSA_CUTS = {(61, 0): [61], (64, 1): [3, 4, 9, 16, 63], (40, 2): [7, 30], (9, 3): [], (1, 4): [], (57, 5): [56]}
HCA_CUTS = {(300, 0): [255], (3000, 1): [1, 128, 700, 1500, 2900, 2990], (127, 2): [125]}


@pytest.mark.parametrize(("layer", "part", "requests"), [(CSA, 0, CSA_CUTS), (CSA, 1, CSA_CUTS), (HCA, 0, HCA_CUTS)])
def test_a_checkpoint_gives_hugging_faces_keys(layer, part, requests, model):
    """Prefill, chunked prefill and decode of several requests at once, against each alone."""
    attention, loaded = model
    compressor = loaded[layer][part]
    config = compressor.config
    lengths = [n for n, _ in requests]
    edges = [[0, *cuts, *range(cuts[-1] + 1 if cuts else 1, n + 1)] for (n, _), cuts in requests.items()]
    hidden = [np.random.default_rng(key).standard_normal((key[0], hf.HIDDEN)).astype(np.float32) for key in requests]
    server = Server(
        compressor, len(requests), max(lengths), chunk=130 if layer == CSA else 1500, keys=True,
        pool=len(requests) * -(-2 * config.window // config.page_rows),
    )  # fmt: skip
    for ab in itertools.zip_longest(*map(itertools.pairwise, edges), fillvalue=(0, 0)):
        server.feed(*(h[a:b] for h, (a, b) in zip(hidden, ab, strict=True)))
    np.testing.assert_array_equal(server.done, lengths)

    for r, cuts in enumerate(requests.values()):
        want = hugging_face_keys(attention[layer], layer, part, hidden[r], cuts)
        assert want.shape == (lengths[r] // config.compress_ratio, config.head_dim)
        made = np.array([server.made[s] for s in server.slots(r)]).reshape(want.shape)
        # The projection's rounding is small beside what this allows: the largest seen is 12 half ulps of 32 or 58.
        assert (np.abs(made - want) <= hf.tolerance(config, want)).all()
        error, largest = np.abs(server.keys(r) - want), np.abs(want).max(axis=1, keepdims=True, initial=0)
        # bf16 first (2**-9 of it), then e4m3 (2**-4 of it, or half of its least step, 2**-10).
        step = 2.0 ** np.ceil(np.log2(largest / 448))
        assert (error <= np.maximum(np.abs(want) * (2.0**-4 + 2.0**-8), step * 2.0**-9)).all()
