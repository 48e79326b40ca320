"""Reading DeepSeek-V4's config.json, as published and as Hugging Face writes it back."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from dsv4_jax import CompressorConfig, Yarn

DATA = Path(__file__).parent / "data"
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
CSA_LAYER = (CompressorConfig.csa(), CompressorConfig.indexer())
HCA_LAYER = (CompressorConfig.hca(),)


def load(name):
    return json.loads((DATA / f"config_{name}.json").read_text())


def small(**changes):
    """A published config of five layers and one for multi-token prediction."""
    return load("flash") | {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]} | changes


def small_hugging_face(**changes):
    """The same as Hugging Face writes it."""
    return (
        load("flash_hugging_face")
        | {"num_hidden_layers": 5, "layer_types": [SLIDING, SLIDING, CSA, HCA, CSA]}
        | changes
    )


def test_flash():
    want = ((), (), *(CSA_LAYER, HCA_LAYER) * 20, CSA_LAYER)
    assert CompressorConfig.from_pretrained_config(DATA / "config_flash.json") == want
    assert CompressorConfig.from_pretrained_config(DATA / "config_flash_hugging_face.json") == want


def test_pro():
    want = (HCA_LAYER, HCA_LAYER, *(CSA_LAYER, HCA_LAYER) * 29, CSA_LAYER)
    assert CompressorConfig.from_pretrained_config(DATA / "config_pro.json") == want


def test_dict_file_and_directory_are_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small()))
    want = ((), (), CSA_LAYER, HCA_LAYER, CSA_LAYER)
    for config in (small(), path, str(path), tmp_path, str(tmp_path)):
        assert CompressorConfig.from_pretrained_config(config) == want


def test_config_is_not_changed():
    for config in (small(), small_hugging_face()):
        before = copy.deepcopy(config)
        CompressorConfig.from_pretrained_config(config)
        assert config == before


def test_formats():
    layers = CompressorConfig.from_pretrained_config(
        small(), csa_format="bf16", hca_format="fp8", indexer_format="indexer_mxfp4"
    )
    assert layers[2] == (CompressorConfig.csa("bf16"), CompressorConfig.indexer("indexer_mxfp4"))
    assert layers[3] == (CompressorConfig.hca("fp8"),)
    with pytest.raises(ValueError, match="'indexer_fp8' stores 128"):
        CompressorConfig.from_pretrained_config(small(), csa_format="indexer_fp8")
    with pytest.raises(ValueError, match="cache_format is 'fp4'"):
        CompressorConfig.from_pretrained_config(small(), indexer_format="fp4")


@pytest.mark.parametrize("style", [small, small_hugging_face])
def test_eps_and_rope_are_read(style):
    config = style(rms_norm_eps=1e-5)
    rope = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.5, "beta_slow": 2}
    if style is small:
        config |= {"compress_rope_theta": 50000, "rope_scaling": rope | {"type": "yarn"}}
    else:
        config["rope_parameters"]["compress"] |= rope | {"rope_theta": 50000}
    _, _, csa_layer, hca_layer, _ = CompressorConfig.from_pretrained_config(config)
    for compressor in csa_layer + hca_layer:
        assert compressor.eps == 1e-5
        assert compressor.rope == Yarn(50000.0, 40.0, 4096, 16.5, 2.0)


def test_the_theta_in_rope_parameters_counts():
    """Hugging Face leaves its default in compress_rope_theta where rope_parameters was given."""
    config = small_hugging_face(compress_rope_theta=160000)
    config["rope_parameters"]["compress"]["rope_theta"] = 20000
    assert CompressorConfig.from_pretrained_config(config)[3][0].rope.theta == 20000


def test_plain_rope():
    plain = Yarn(160000.0, factor=1.0)
    config = small_hugging_face()
    config["rope_parameters"]["compress"] = {"rope_type": "default", "rope_theta": 160000}
    assert CompressorConfig.from_pretrained_config(config)[3][0].rope == plain
    assert CompressorConfig.from_pretrained_config(small(rope_scaling=None))[3][0].rope == plain
    # A null beside rope_parameters says nothing.
    assert CompressorConfig.from_pretrained_config(small_hugging_face(rope_scaling=None))[3][0].rope == Yarn()


def test_compress_rates_other_than_the_models():
    rates = {CSA: 8, HCA: 64}
    layers = CompressorConfig.from_pretrained_config(small_hugging_face(compress_rates=rates))
    eight = {"compress_ratio": 8, "kv_page_rows": 32}
    assert layers[2] == tuple(dataclasses.replace(c, **eight) for c in CSA_LAYER)
    assert layers[3] == (dataclasses.replace(HCA_LAYER[0], compress_ratio=64, kv_page_rows=4),)


@pytest.mark.parametrize("layers", [1, 5])
def test_what_follows_the_layers_belongs_to_multi_token_prediction(layers):
    """The released Flash has 43 layers and one of prediction, and 46 ratios; Pro 61 layers and 64 ratios."""
    ratios, want = [0, 0, 4, 128, 4][-layers:], [(), (), CSA_LAYER, HCA_LAYER, CSA_LAYER][-layers:]
    for more in ([], [0], [0, 0], [0, 4, 0], [7]):
        config = small(num_hidden_layers=layers, compress_ratios=ratios + more)
        assert CompressorConfig.from_pretrained_config(config) == tuple(want)
    kinds = [SLIDING, SLIDING, CSA, HCA, CSA][-layers:] + [SLIDING] * 3
    config = small_hugging_face(num_hidden_layers=layers, layer_types=kinds)
    assert CompressorConfig.from_pretrained_config(config) == tuple(want)


def test_one_token_a_key_compresses_nothing():
    layers = CompressorConfig.from_pretrained_config(small(compress_ratios=[1, 1, 4, 128, 4, 1]))
    assert layers == ((), (), CSA_LAYER, HCA_LAYER, CSA_LAYER)
    both = small(compress_ratios=[1, 0, 4, 128, 4]) | small_hugging_face()
    assert CompressorConfig.from_pretrained_config(both) == layers


def test_null_is_a_missing_field():
    """Writers put null for what the other style says."""
    want = CompressorConfig.from_pretrained_config(small())
    for key in ("layer_types", "rope_parameters", "compress_rates", "partial_rotary_factor", "text_config",
                "num_nextn_predict_layers"):  # fmt: skip
        assert CompressorConfig.from_pretrained_config(small(**{key: None})) == want, key
    for key in ("compress_ratios", "rope_scaling", "compress_rope_theta", "qk_rope_head_dim"):
        assert CompressorConfig.from_pretrained_config(small_hugging_face(**{key: None})) == want, key
    nulls = {"rope_type": None, "attention_factor": None, "truncate": None, "partial_rotary_factor": None}
    assert CompressorConfig.from_pretrained_config(small(rope_scaling=small()["rope_scaling"] | nulls)) == want
    nested = small_hugging_face()
    nested["rope_parameters"]["compress"] |= {"type": None, "attention_factor": None}
    assert CompressorConfig.from_pretrained_config(nested) == want


def test_flat_rope_parameters():
    """As Hugging Face takes them: for compressed layers, but for the theta, which is that of sliding windows."""
    flat = small()["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000, "partial_rotary_factor": 0.125}
    config = small(rope_parameters=flat, compress_rope_theta=50000)
    want = Yarn(50000.0)
    for changes in ({}, {"rope_scaling": None}):
        assert CompressorConfig.from_pretrained_config(config | changes)[3][0].rope == want
    del config["rope_scaling"]
    assert CompressorConfig.from_pretrained_config(config)[3][0].rope == want
    with pytest.raises(ValueError, match=r"^config: rope_parameters\.partial_rotary_factor is 0\.5; it must be 0\.125"):
        CompressorConfig.from_pretrained_config(config | {"rope_parameters": flat | {"partial_rotary_factor": 0.5}})
    with pytest.raises(ValueError, match=r"^config: compress_rope_theta is None; it must be a positive number"):
        CompressorConfig.from_pretrained_config(config | {"compress_rope_theta": None})


def test_fields_under_text_config():
    for text in (small(), small_hugging_face()):
        config = {"model_type": "some_vision_model", "vision_config": {"head_dim": 64}, "text_config": text}
        assert CompressorConfig.from_pretrained_config(config) == CompressorConfig.from_pretrained_config(text)
    del text["head_dim"]
    with pytest.raises(ValueError, match=r"^config: text_config\.head_dim is missing; it must be 512"):
        CompressorConfig.from_pretrained_config({"text_config": text})


def test_both_styles_in_one_file():
    config = small() | small_hugging_face()
    assert CompressorConfig.from_pretrained_config(config) == CompressorConfig.from_pretrained_config(small())


def test_qk_rope_head_dim_or_its_fraction():
    config = small_hugging_face()
    del config["qk_rope_head_dim"]
    assert CompressorConfig.from_pretrained_config(config) == CompressorConfig.from_pretrained_config(small())


def edit(config, path, value):
    *parents, key = path.split(".")
    fields = config
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[key]
    else:
        fields[key] = value
    return config


@pytest.mark.parametrize(
    ("style", "path", "value", "message"),
    [
        (small, "model_type", "deepseek_v3", "model_type is 'deepseek_v3'; it must be 'deepseek_v4'"),
        (small, "model_type", None, "model_type is missing; it must be 'deepseek_v4'"),
        (small, "head_dim", None, "head_dim is missing; it must be 512"),
        (small, "head_dim", 256, "head_dim is 256; it must be 512"),
        (small, "index_head_dim", 64, "index_head_dim is 64; it must be 128"),
        (small, "index_head_dim", None, "index_head_dim is missing"),
        (small, "qk_rope_head_dim", 32, "qk_rope_head_dim is 32; it must be 64"),
        (small, "qk_rope_head_dim", None, "qk_rope_head_dim is missing; it must be 64"),
        (small, "rms_norm_eps", None, "rms_norm_eps is missing; it must be a positive number"),
        (small, "rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'; it must be a positive number"),
        (small, "rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        (small, "num_hidden_layers", None, "num_hidden_layers is missing; it must be an integer"),
        (small, "num_hidden_layers", 43, "compress_ratios has 6 entries; it must have at least 43"),
        (small, "num_hidden_layers", True, "num_hidden_layers is True"),
        (small, "compress_ratios", None, "compress_ratios is missing; it or layer_types must be given"),
        (small, "compress_ratios", 4, "compress_ratios is 4; it must be a list"),
        (small, "compress_ratios", [0, 0, 8, 128, 4, 0], r"compress_ratios\[2\] is 8; it must be 0 or 1 or 4 or 128"),
        (small, "compress_ratios", [0, 0, 4, "128", 4, 0], r"compress_ratios\[3\] is '128'"),
        (small, "compress_ratios", [0, 0, 4, [128], 4, 0], r"compress_ratios\[3\] is \[128\]"),
        (small, "compress_ratios", [0, 0, 4, 128.0, 4, 0], r"compress_ratios\[3\] is 128.0"),
        (small, "compress_ratios", [0, 0, 4, 128, True, 0], r"compress_ratios\[4\] is True"),
        (small, "text_config", {"model_type": "llama"}, "text_config.model_type is 'llama'; it must be 'deepseek_v4'"),
        (small, "text_config", 3, "text_config is 3; it must be an object"),
        (small, "rope_parameters", {"factor": 16}, "rope_parameters.rope_type is missing; it must be 'yarn'"),
        (small, "compress_rope_theta", None, "compress_rope_theta is missing"),
        (small, "rope_scaling", None, "rope_scaling is missing; it or rope_parameters must be given"),
        (small, "rope_scaling", 16, "rope_scaling is 16; it must be an object"),
        (small, "rope_scaling.type", None, "rope_scaling.rope_type is missing; it must be 'yarn' or 'default'"),
        (small, "rope_scaling.type", "linear", "rope_scaling.type is 'linear'; it must be 'yarn' or 'default'"),
        (small, "rope_scaling.rope_type", "default", "rope_scaling.type is 'yarn'; it must be 'default', as rope_type"),
        (small, "rope_scaling.factor", None, "rope_scaling.factor is missing; it must be a positive number"),
        (small, "rope_scaling.factor", 0.5, "rope_scaling: factor is 0.5; it must be at least 1"),
        (small, "rope_scaling.beta_fast", None, "rope_scaling.beta_fast is missing"),
        (small, "rope_scaling.beta_slow", None, "rope_scaling.beta_slow is missing"),
        (small, "rope_scaling.beta_slow", 64, "rope_scaling: beta_slow is 64.0, beta_fast 32.0"),
        (
            small,
            "rope_scaling.original_max_position_embeddings",
            None,
            "rope_scaling.original_max_position_embeddings is missing; it must be an integer",
        ),
        (small_hugging_face, "layer_types", None, "compress_ratios is missing; it or layer_types"),
        (small_hugging_face, "layer_types", [SLIDING] * 4, "layer_types has 4 entries; it must have at least 5"),
        (
            small_hugging_face,
            "layer_types",
            ["full_attention"] * 5,
            r"layer_types\[0\] is 'full_attention'; it must be",
        ),
        (small_hugging_face, "compress_rates", None, "compress_rates is missing; it must be an object"),
        (small_hugging_face, f"compress_rates.{HCA}", None, f"compress_rates.{HCA} is missing"),
        (small_hugging_face, f"compress_rates.{CSA}", 3, f"compress_rates.{CSA} is 3; it must be a power of two"),
        (small_hugging_face, f"compress_rates.{CSA}", 0, f"compress_rates.{CSA} is 0; it must be a power of two"),
        (small_hugging_face, "rope_parameters.compress", None, "rope_parameters.compress is missing"),
        (small_hugging_face, "rope_parameters.compress.rope_theta", None, "rope_parameters.compress.rope_theta is"),
        (
            small_hugging_face,
            "rope_parameters.compress.rope_theta",
            1,
            "rope_parameters.compress: theta is 1.0; it must",
        ),
        (small_hugging_face, "rope_parameters.compress.truncate", False, "compress.truncate is False; it must be True"),
        (small_hugging_face, "rope_parameters.compress.factor", None, "rope_parameters.compress.factor is missing"),
        (
            small_hugging_face,
            "rope_parameters.compress.attention_factor",
            1.28,
            "attention_factor is 1.28; it must be 1",
        ),
        (small_hugging_face, "partial_rotary_factor", 0.25, r"partial_rotary_factor is 0.25; it must be 0.125"),
        (
            small_hugging_face,
            "rope_parameters.compress.partial_rotary_factor",
            0.25,
            "rope_parameters.compress.partial_rotary_factor is 0.25",
        ),
        (
            small_hugging_face,
            "compress_ratios",
            [0, 0, 128, 4, 4],
            "compress_ratios says .*, layer_types .*; they must",
        ),
        (small_hugging_face, "compress_ratios", [0, 0, 4, 128, 128, 0], "compress_ratios says .*; they must agree"),
        (
            small_hugging_face,
            "rope_scaling",
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
            "rope_scaling says .*factor=4.*, rope_parameters .*factor=16.*; they must agree",
        ),
    ],
)
def test_errors_name_the_file_the_key_and_what_it_must_be(tmp_path, style, path, value, message):
    config = edit(style(), path, value)
    with pytest.raises(ValueError, match=f"^config: .*{message}"):
        CompressorConfig.from_pretrained_config(config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        CompressorConfig.from_pretrained_config(tmp_path)
    assert str(error.value).startswith(f"{file}: ")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        CompressorConfig.from_pretrained_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: "):
        CompressorConfig.from_pretrained_config(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds a list; it must hold a JSON object"):
        CompressorConfig.from_pretrained_config(file)
    with pytest.raises(TypeError, match=r"config is a int; it must be a dict or a path"):
        CompressorConfig.from_pretrained_config(4)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_what_hugging_face_writes_back(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    published = load(name)
    want = CompressorConfig.from_pretrained_config(published)
    published.pop("architectures")
    config = transformers.DeepseekV4Config(**copy.deepcopy(published))
    assert CompressorConfig.from_pretrained_config(config.to_dict()) == want
    config.save_pretrained(tmp_path)
    assert CompressorConfig.from_pretrained_config(tmp_path) == want
    again = transformers.DeepseekV4Config.from_pretrained(tmp_path)
    assert CompressorConfig.from_pretrained_config(again.to_dict()) == want


def test_hugging_face_without_scaling():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    config = transformers.DeepseekV4Config(num_hidden_layers=3, layer_types=[SLIDING, CSA, HCA])
    layers = CompressorConfig.from_pretrained_config(config.to_dict())
    assert [len(layer) for layer in layers] == [0, 2, 1]
    assert layers[2][0].rope == Yarn(160000.0, factor=1.0)
