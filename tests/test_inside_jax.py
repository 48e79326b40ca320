"""The ops inside JAX: in place under jit, scan and fori_loop, their names, their limits, and which one runs."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import random_batch
from helpers.sweep import sweep

import dsv4_jax

GPU_TOO = True
ON_GPU = jax.default_backend() != "cpu"


def arguments(fmt="fp8_ds_mla", pages=None, kind="csa", seed=7):
    """A batch, its metadata, and every op as a function of the caches it updates."""
    config = ops.make_config(kind, fmt, 4, 2)
    batch = random_batch(np.random.default_rng(seed), config, "chunked", tokens=27, spare_pages=pages or 2)
    return batch, ops.metadata(batch)


def calls(batch, meta, implementation):
    """name -> (function of its caches, the caches)."""
    config, w = batch.config, batch.width
    kv_score, ape, norm_weight, cos_sin, positions, slots = (
        jnp.asarray(a)
        for a in (batch.kv_score, batch.ape, batch.norm_weight, batch.cos_sin, batch.positions, batch.slot_mapping)
    )

    def save(state):
        return (
            dsv4_jax.save_partial_states(
                kv_score[:, :w], kv_score[:, w:], ape, positions, state, slots,
                compress_ratio=config.compress_ratio, implementation=implementation,
            ),
        )  # fmt: skip

    def store(state, cache):
        return (
            state,
            dsv4_jax.compress_norm_rope_store(
                state, cache, meta, norm_weight, cos_sin, config=config, kv_scale=batch.kv_scale,
                implementation=implementation,
            ),
        )  # fmt: skip

    def compress(state, cache):
        return dsv4_jax.compress(
            kv_score, ape, state, cache, meta, norm_weight, cos_sin, config=config, kv_scale=batch.kv_scale,
            implementation=implementation,
        )  # fmt: skip

    state, cache = batch.state, batch.cache
    return {
        "save_partial_states": (save, (state,)),
        "compress_norm_rope_store": (store, (ops.saved(batch), cache)),
        "compress": (compress, (state, cache)),
    }


def looped(function, loop):
    """`function` three times over: it writes the same rows each time."""
    if loop == "jit":
        return function
    if loop == "scan":
        return lambda *caches: jax.lax.scan(lambda carry, _: (tuple(function(*carry)), None), caches, None, length=3)[0]
    return lambda *caches: jax.lax.fori_loop(0, 3, lambda _, carry: tuple(function(*carry)), caches)


LOOPS = ("jit", "scan", "fori_loop")
IN_PLACE = [
    *((name, loop, "fp8_ds_mla") for name in ("compress_norm_rope_store", "compress") for loop in LOOPS),
    *(("save_partial_states", loop, "bf16") for loop in LOOPS),  # it knows no format
    *((name, "jit", fmt) for name in ("compress_norm_rope_store", "compress") for fmt in ("bf16", "fp8")),
    *sweep(*(
        (name, loop, fmt)
        for name in ("compress_norm_rope_store", "compress") for loop in LOOPS[1:] for fmt in ("bf16", "fp8")
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loop", "fmt"), IN_PLACE)
def test_in_place(name, loop, fmt, implementation):
    """Donated caches are updated where they are, and no instruction copies one.

    On the CPU the Triton interpreter is a callback, whose results are new buffers, and XLA copies an fp8 array to see
    it as bytes; there only the bytes are held.
    """
    batch, meta = arguments(fmt)
    function, caches = calls(batch, meta, implementation)[name]
    compiled = (
        jax.jit(looped(function, loop), donate_argnums=tuple(range(len(caches))))
        .lower(*(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches))
        .compile()
    )
    on_device = [jnp.array(c, copy=True) for c in caches]
    addresses = [c.unsafe_buffer_pointer() for c in on_device]
    results = compiled(*on_device)
    if ON_GPU or (implementation == "xla" and fmt != "fp8"):
        assert not ops.copies(compiled, *on_device)
        assert [r.unsafe_buffer_pointer() for r in results] == addresses
        assert all(c.is_deleted() for c in on_device)
    if name == "save_partial_states":
        ops.same_bytes(results[0], ops.saved(batch))
    else:
        ops.same_bytes(results[0], ops.tail(batch) if name == "compress" else ops.saved(batch))
        exact = ops.rows(batch, caches[0], from_batch=name == "compress")
        oracle.assert_same_cache(results[1], batch.cache, exact, batch.config, scale=batch.kv_scale)


def test_a_copy_is_found():
    """The check of the HLO can fail: a cache that is also returned as it was must be copied."""
    batch, meta = arguments()
    function, caches = calls(batch, meta, "xla")["compress"]
    compiled = jax.jit(lambda state, cache: (*function(state, cache), cache), donate_argnums=(0, 1))
    compiled = compiled.lower(*(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches)).compile()
    assert ops.copies(compiled, caches[1])


def test_without_donation_the_arguments_stay(implementation):
    batch, meta = arguments()
    for function, caches in calls(batch, meta, implementation).values():
        on_device = [jnp.array(c, copy=True) for c in caches]
        jax.block_until_ready(function(*on_device))
        for before, after in zip(caches, on_device, strict=True):
            ops.same_bytes(after, before)


def test_one_compilation_serves_new_values(implementation):
    """Which tokens close windows is data."""
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def run(kv_score, ape, state, cache, meta, norm_weight, cos_sin, *, config):
        traces.append(1)
        return dsv4_jax.compress(
            kv_score, ape, state, cache, meta, norm_weight, cos_sin, config=config, implementation=implementation
        )

    for seed in range(3):
        batch, meta = arguments(seed=seed)
        names = ("kv_score", "ape", "state", "cache")
        _, cache = run(*(getattr(batch, n) for n in names), meta, batch.norm_weight, batch.cos_sin, config=batch.config)
        exact = ops.rows(batch, batch.state, from_batch=True)
        oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
    assert len(traces) == 1


def test_names_stand_in_the_jaxpr():
    batch, meta = arguments()
    for name, (function, caches) in calls(batch, meta, None).items():
        jaxpr = jax.make_jaxpr(function)(*caches)
        assert name in {str(equation.primitive) for equation in jaxpr.eqns}
        assert [a.shape for a in jaxpr.out_avals] == [c.shape for c in caches]


def test_no_grad_and_no_vmap(implementation):
    batch, meta = arguments()
    for name, (function, caches) in calls(batch, meta, implementation).items():
        caches = tuple(map(jnp.asarray, caches))
        with pytest.raises(NotImplementedError, match=rf"{name}\b.*derivative.*(stop_gradient|custom_vjp)"):
            jax.grad(lambda s, f=function, c=caches: f(s, *c[1:])[0].sum())(caches[0])
        with pytest.raises(NotImplementedError, match=rf"{name}\b.*(vmap|batched).*(requests|lax\.map)"):
            jax.vmap(function)(*(c[None] for c in caches))


def test_implementation_is_checked():
    batch, meta = arguments()
    for name, (function, caches) in calls(batch, meta, "cuda").items():
        with pytest.raises(ValueError, match=r"implementation is 'cuda'.*'xla'.*'triton'"):
            function(*caches)
        if not ON_GPU:
            function = calls(batch, meta, "cutedsl")[name][0]
            with pytest.raises(NotImplementedError, match=rf"{name}.*cutedsl.*(use one of|run on cpu too)"):
                function(*caches)


def test_default_implementation_from_the_environment(monkeypatch):
    batch, meta = arguments()
    function, caches = calls(batch, meta, None)["compress"]
    monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "nonsense")
    with pytest.raises(ValueError, match=r"DSV4_JAX_IMPLEMENTATION is 'nonsense'.*xla.*triton"):
        function(*caches)
    monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "xla")
    _, cache = function(*caches)
    exact = ops.rows(batch, batch.state, from_batch=True)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
    if not ON_GPU:
        monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "cutedsl")
        with pytest.raises(NotImplementedError, match="cutedsl"):
            function(*caches)
        # A name in the call goes before it.
        calls(batch, meta, "xla")["compress"][0](*caches)


def run_python(code, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_import_is_light():
    """The package alone imports neither torch nor triton, and starts no backend."""
    code = (
        "import sys, dsv4_jax\n"
        "assert not {'torch', 'triton', 'jax_triton', 'cutlass', 'flax'} & set(sys.modules), sys.modules\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_triton_on_the_cpu_without_its_interpreter_says_what_to_do():
    code = (
        "import jax.numpy as jnp, numpy as np, dsv4_jax\n"
        "f = lambda *s: jnp.zeros(s)\n"
        "i = jnp.zeros(2, jnp.int32)\n"
        "dsv4_jax.save_partial_states(f(2, 8), f(2, 8), f(4, 8), i, f(1, 4, 16), i, compress_ratio=4,"
        " implementation='triton')\n"
    )
    done = run_python(code)
    assert done.returncode != 0
    assert "NotImplementedError" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr and "xla" in done.stderr


def test_int64_indices(implementation):
    batch, narrow = arguments()
    with jax.enable_x64(True):
        names = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")
        wide = {n: jnp.asarray(getattr(batch, n).astype(np.int64)) for n in names}
        assert wide["positions"].dtype == jnp.int64
        plan = {n: jnp.asarray(np.asarray(getattr(narrow, n), np.int64)) for n in ("closing", "window_slots", "saving")}
        meta = dsv4_jax.CompressorMetadata(**wide, **plan, layout=narrow.layout)
        state, cache = ops.compress(batch, meta, implementation=implementation)
        ops.same_bytes(state, ops.tail(batch))
        exact = ops.rows(batch, batch.state, from_batch=True)
        oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
        w = batch.width
        slots = batch.slot_mapping.astype(np.int64)
        slots[:2] += 2**32  # must not wrap round to the slots they were
        arrays = (batch.kv_score[:, :w], batch.kv_score[:, w:], batch.ape, wide["positions"], batch.state, slots)
        state = dsv4_jax.save_partial_states(*map(jnp.asarray, arrays), compress_ratio=4, implementation=implementation)
        ops.same_bytes(state, ops.saved(batch, tokens=range(2, len(slots))))


def test_shard_map_wants_a_cache_for_each_device():
    """A cache that is the same on all devices, with a batch that is not, cannot stay the same: an error says so."""
    code = """
        import jax, jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        import dsv4_jax

        csa = dsv4_jax.CompressorConfig.csa("bf16")
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        kv, ape = jnp.ones((8, 1024)), jnp.zeros((4, 1024))
        slots = jnp.arange(8, dtype=jnp.int32) % 4

        def save(states, kv, slots):
            return dsv4_jax.save_partial_states(kv, kv, ape, slots, states, slots, compress_ratio=4)

        def run(cache_spec, states):
            sharded = jax.shard_map(save, mesh=mesh, in_specs=(cache_spec, P("data"), P("data")), out_specs=cache_spec)
            return jax.jit(sharded)(states, kv, slots)

        assert run(P("data"), jnp.zeros((2, 4, 2048)))[:, :, 0].tolist() == [[1] * 4] * 2
        try:
            run(P(), jnp.zeros((1, 4, 2048)))
        except ValueError as error:
            assert "shard the cache too" in str(error) and "along data" in str(error), error
        else:
            raise AssertionError("no error")
    """
    done = run_python(textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("axes", [("data",), ("data", "model")])
def test_shard_map_of_an_op_that_returns_new_arrays(axes):
    """Over all axes of the mesh, or one of two: each device has the results of its own rows."""
    code = f"""
        import jax, jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        import dsv4_jax

        mesh = jax.make_mesh((2, 2)[: {len(axes)}], {axes}, axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)})
        ids = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
        weights, hidden = jnp.ones((4, 2)), jnp.full((4, 128), 448, jnp.bfloat16)
        padding = jnp.array([False, True, False, False])
        f = jax.shard_map(
            dsv4_jax.prepare_megamoe_inputs, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={{"data"}}
        )
        x, scales, ids, weights = jax.jit(f)(hidden, weights, ids, padding)
        assert (x.astype(jnp.float32) == 448).all() and (scales == 0x7F7F7F7F).all()
        assert ids.tolist() == [[0, 1], [-1, -1], [4, 5], [6, 7]], ids
        assert weights.tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]], weights
        assert x.sharding.spec == P("data"), x.sharding
    """
    done = run_python(textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr


def test_disable_jit():
    batch, meta = arguments("bf16")
    with jax.disable_jit():
        state, _ = ops.compress(batch, meta)
    ops.same_bytes(state, ops.tail(batch))


def test_explicit_sharding_is_refused():
    code = """
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    import dsv4_jax

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    states = jax.device_put(jnp.zeros((2, 4, 16)), NamedSharding(mesh, P("data")))
    rows, slots = jnp.ones((1, 8)), jnp.zeros(1, jnp.int32)
    try:
        dsv4_jax.save_partial_states(rows, rows, jnp.zeros((4, 8)), slots, states, slots, compress_ratio=4)
    except NotImplementedError as error:
        assert "shard_map" in str(error), error
    else:
        raise AssertionError("no error")
    """
    done = run_python(textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr


def test_triton_imported_before_its_interpreter_is_asked_for_says_so():
    code = """
    import os, triton
    os.environ["TRITON_INTERPRET"] = "1"
    import jax.numpy as jnp, dsv4_jax
    rows, slots = jnp.ones((1, 8)), jnp.zeros(1, jnp.int32)
    arrays = rows, rows, jnp.zeros((4, 8)), slots, jnp.zeros((2, 4, 16)), slots
    try:
        dsv4_jax.save_partial_states(*arrays, compress_ratio=4, implementation="triton")
    except NotImplementedError as error:
        assert "before anything imports triton" in str(error), error
    else:
        raise AssertionError("no error")
    """
    done = run_python(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
