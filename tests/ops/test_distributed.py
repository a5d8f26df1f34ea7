"""Two processes of one program: nothing is measured, both use the same configs, and results are right."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shown import HEURISTIC

PROGRAM = """
    import json, sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
    import ejkernel
    from ejkernel.kernels._registry import kernel_registry
    from ejkernel.ops import Tuner, default_executor
    from ejkernel.types import KernelConfig
    from shown import Shown, ran

    # Something to measure for the forward, the tangent and the backward; to measure it is an error.
    for name in ("flash_attention", "flash_attention_jvp", "flash_attention_bwd"):
        for entry in kernel_registry.list_implementations(name):
            entry.implementation.space = lambda *_: [KernelConfig(block_q=16), KernelConfig(block_q=32)]
    Tuner.measure = None
    chosen = []
    selector = default_executor().selector
    selector._on_event = lambda event, operation, key, config: chosen.append([event, key, str(config)])

    kind = getattr(jax.sharding.AxisType, sys.argv[3])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    over_batch = NamedSharding(mesh, P("x"))
    whole = np.random.default_rng(0).standard_normal((4, 16, 2, 16)).astype(np.float32)
    q = jax.make_array_from_callback(whole.shape, over_batch, lambda part: whole[part])
    a = jax.make_array_from_callback((2, 4), over_batch, lambda part: np.ones((2, 4), np.float32)[part])
    attention = lambda q: (ejkernel.lax.flash_attention(q, q, q, causal=True) ** 2).sum()
    with warnings.catch_warnings(record=True) as warned, jax.set_mesh(mesh):
        warnings.simplefilter("always", UserWarning)
        loss, gradient = jax.jit(jax.value_and_grad(attention))(q)
        b = jax.jit(Shown())(a)
    mine = lambda x: [np.asarray(shard.data).tolist() for shard in x.addressable_shards]
    print(json.dumps({
        "processes": jax.process_count(),
        "chosen": chosen,
        "warned": [str(w.message) for w in warned if "configs" in str(w.message)],
        "loss": float(loss.addressable_data(0)),
        "gradient": mine(gradient),
        "ran": str(ran(b.addressable_data(0))),
    }))
"""


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def both(tmp_path, *arguments):
    """The output of the two processes, by their number. Each has its own cache directory, as hosts have."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EJKERNEL_AUTOTUNE_POLICY": "autotune",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), address, str(number), *arguments],
            env=environment | {"EJKERNEL_CACHE_DIR": str(tmp_path / str(number))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err for _, err in printed)
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["Explicit", "Auto"])
def test_two_processes_have_the_same_configs_without_measuring(tmp_path, axes):
    first, second = both(tmp_path, axes)
    assert first["processes"] == second["processes"] == 2
    assert first["chosen"] == second["chosen"] and {event for event, _, _ in first["chosen"]} == {"heuristics"}
    assert {key.split("|")[0] for _, key, _ in first["chosen"]} == {
        "flash_attention@v1",
        "flash_attention_jvp@v1",
        "flash_attention_bwd@v1",
        "shown@v1",
    }
    warning = "configs are not measured with several processes; the heuristic ones are used"
    assert first["warned"] == second["warned"] == [warning]
    assert first["ran"] == second["ran"] == str(HEURISTIC)

    q = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16, 2, 16)), jnp.float32)
    formula = lambda q: (jax.nn.dot_product_attention(q, q, q, is_causal=True) ** 2).sum()
    loss, gradient = jax.value_and_grad(formula)(q)
    np.testing.assert_allclose([first["loss"], second["loss"]], [loss, loss], rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([*first["gradient"], *second["gradient"]]), gradient, rtol=1e-4, atol=1e-5
    )
