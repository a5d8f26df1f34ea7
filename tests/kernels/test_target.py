"""The GPU of a program: by its name, by the device itself, and the implementations chosen for it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels import _target
from ejkernel.kernels._pallas.gpu import flash_attention as mosaic
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.grouped_matmul.configs import OLDER
from ejkernel.ops.utils.devices import device_target, local_target, target_of
from ejkernel.types import Platform, Target

# Names by the driver, and NVIDIA's list of compute capabilities.
KINDS = {
    70: ["Tesla V100-SXM2-16GB", "NVIDIA TITAN V", "Quadro GV100", "Tesla V100S-PCIE-32GB"],
    72: ["Xavier"],
    75: [
        *("Tesla T4", "NVIDIA T4", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2070 SUPER", "NVIDIA TITAN RTX"),
        *(
            "Quadro RTX 5000",
            "Quadro RTX 6000",
            "Quadro RTX 4000 with Max-Q Design",
            "Quadro T2000",
            "NVIDIA T1000 8GB",
        ),
        *("NVIDIA GeForce GTX 1660 Ti", "NVIDIA T600 Laptop GPU"),
    ],
    80: ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe MIG 1g.10gb", "NVIDIA A800-SXM4-40GB", "NVIDIA A30"],
    86: [
        *("NVIDIA A2", "NVIDIA A10", "NVIDIA A10G", "NVIDIA A16", "NVIDIA A40", "NVIDIA A40-48Q", "NVIDIA RTX A6000"),
        *("NVIDIA RTX A500 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 3050 6GB Laptop GPU"),
        *("NVIDIA RTX A2000 12GB", "NVIDIA GeForce RTX 2050"),
    ],
    87: ["Orin", "NVIDIA Jetson AGX Orin"],
    89: [
        *("NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA L20", "NVIDIA L2", "NVIDIA RTX 6000 Ada Generation"),
        *(
            "NVIDIA RTX 4000 SFF Ada Generation",
            "NVIDIA RTX 500 Ada Generation Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
        ),
        *("NVIDIA RTX 5000 Ada Generation", "NVIDIA GeForce RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4060 Laptop GPU"),
    ],
    90: [
        *(
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA H200",
            "NVIDIA H200 NVL",
            "NVIDIA H800",
        ),
        *("NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    ],
    100: ["NVIDIA B200", "NVIDIA GB200"],
    103: ["NVIDIA B300 SXM6 AC", "NVIDIA GB300"],
    110: ["NVIDIA Thor", "NVIDIA Jetson AGX Thor"],
    120: [
        *("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5070 Ti Laptop GPU"),
        *("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 500 Blackwell Generation Laptop GPU"),
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ],
    121: ["NVIDIA GB10"],
    None: ["NVIDIA X1000", "NVIDIA R100", "NVIDIA A1", "NVIDIA GeForce RTX 6090", "GPU", "NVIDIA GeForce GTX 1080"],
}
HEADS = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.bfloat16)
CALLS = {
    "flash_attention": (HEADS, HEADS, HEADS),
    "grouped_matmul": (
        jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    ),
    "gla": (HEADS, HEADS, HEADS, HEADS),
}


@pytest.mark.parametrize("kind, capability", [(kind, of) for of, kinds in KINDS.items() for kind in kinds])
def test_the_compute_capability_that_a_name_says(kind, capability):
    assert Target("cuda", kind).compute_capability == capability


def test_the_default_gpu_is_an_h100():
    assert (Target("cuda").compute_capability, Target("cuda").core_count) == (90, 132)
    assert Target("rocm", "gfx942").compute_capability is None and Target("tpu", "TPU v5").core_count is None


@pytest.mark.parametrize("operation", CALLS)
def test_an_unknown_gpu_gets_what_runs_everywhere(operation):
    pytest.importorskip("jax_triton")
    found = ejkernel.explain(operation, *CALLS[operation], target=Target("cuda", "NVIDIA X1000"))
    assert found.config.platform == Platform.XLA
    reasons = {entry.platform: reason for entry, reason in found.candidates if entry.backend == "gpu"}
    assert "compute capability 8.0, not an unknown one" in reasons[Platform.TRITON]
    assert all("not an unknown one" in reason for reason in reasons.values())


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("capability", [of for of in KINDS if of is not None])
def test_the_implementation_on_each_gpu(operation, capability):
    """Only Hopper gets Hopper kernels; Triton kernels begin with 8.0, XLA takes the rest."""
    pytest.importorskip("jax_triton")
    target = Target("cuda", KINDS[capability][0])
    found = ejkernel.explain(operation, *CALLS[operation], target=target)
    wanted = Platform.TRITON if capability >= 80 else Platform.XLA
    if (capability, operation) == (90, "flash_attention"):
        wanted = Platform.PALLAS
    assert found.config.platform == wanted
    for_hopper = [reason for entry, reason in found.candidates if (entry.platform, entry.backend) == ("pallas", "gpu")]
    assert capability == 90 or all("for compute capability 9.0, not" in reason for reason in for_hopper)


def test_geforce_gets_the_configs_of_gpus_without_hoppers_matrix_units():
    """And tiles that fit into 99 KiB of shared memory."""
    pytest.importorskip("jax_triton")
    of = lambda operation, kind: ejkernel.explain(operation, *CALLS[operation], target=Target("cuda", kind)).config
    for kind in ("NVIDIA GeForce RTX 5090", "NVIDIA GB10"):
        assert _launch.shared_memory_limit(Target("cuda", kind)) == 99 * 1024
        assert of("flash_attention", kind) == of("flash_attention", "NVIDIA L4")
        config = of("grouped_matmul", kind)
        assert (config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages) == OLDER[0]
    assert of("grouped_matmul", "NVIDIA GB300") == of("grouped_matmul", "NVIDIA H200") != config
    limits = {kind: _launch.shared_memory_limit(Target("cuda", kind)) >> 10 for kind in ("Orin", "GB300", "Thor", "A2")}
    assert limits == {"Orin": 163, "GB300": 227, "Thor": 227, "A2": 99}


# --- Devices


class Device(SimpleNamespace):
    """A device that can be a key, as those of JAX."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def gpu(kind="NVIDIA X1000", capability="12.0", core_count=170):
    return Device(platform="gpu", device_kind=kind, compute_capability=capability, core_count=core_count)


@pytest.fixture
def with_gpu(monkeypatch):
    """`with_gpu(device)`: this process has one."""

    def become(device, platform="cuda"):
        others = jax.local_devices

        def local_devices(*, backend=None):
            if backend == platform:
                return [device]
            if backend in ("cuda", "rocm"):
                raise RuntimeError(f"Unknown backend {backend}")
            return others(backend=backend)

        monkeypatch.setattr(jax, "local_devices", local_devices)
        _target.first_device.cache_clear()
        _target.target_of_device.cache_clear()

    yield become
    monkeypatch.undo()
    _target.first_device.cache_clear()
    _target.target_of_device.cache_clear()


def test_a_device_tells_what_it_is(with_gpu):
    with_gpu(gpu())
    target = target_of("cuda")
    assert target == gpu_target() == Target("cuda", "NVIDIA X1000", 120)
    assert (_launch.compute_capability(), _launch.multiprocessors(), target.core_count) == (120, 170, 170)
    assert not _launch.is_rocm()
    assert "for compute capability 9.0, not 12.0" in mosaic.supports(None, None, target)


def test_its_name_does_not_decide_against_it(with_gpu):
    with_gpu(gpu("NVIDIA H100 engineering sample of another architecture", "10.0", 148))
    assert (target_of("cuda").compute_capability, target_of("cuda").core_count) == (100, 148)


def test_an_abstract_device_of_the_kind_that_is_here_is_it(with_gpu):
    with_gpu(gpu())
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA X1000")):
        assert (local_target().compute_capability, local_target().core_count) == (120, 170)
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA H100 PCIe")):
        assert (local_target().compute_capability, local_target().core_count) == (90, 114)


def test_a_gpu_of_amd(with_gpu):
    with_gpu(Device(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942"), "rocm")
    assert target_of("rocm") == gpu_target() == Target("rocm", "AMD Instinct MI300X")
    assert _launch.is_rocm() and target_of("cuda") == Target("cuda")


def test_without_a_gpu_nothing_is_known():
    assert target_of("cuda") == gpu_target() == Target("cuda") and device_target().platform == "cpu"


# --- Implementations


def abstract_mesh(kind):
    named = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=named)


def test_an_implementation_is_traced_for_what_it_is_lowered_for(monkeypatch, with_gpu):
    monkeypatch.setattr(kernel_registry, "_registry", dict(kernel_registry._registry))
    computes, seen = kernel_registry.find("mean_pooling", "xla").implementation, []

    @kernel_registry.register("mean_pooling", "pallas", "gpu", priority=1000)
    def implementation(*args, **kwargs):
        seen.append(gpu_target())
        return computes(*args, **kwargs)

    with_gpu(gpu())
    pooled = jax.jit(lambda x: ejkernel.lax.mean_pooling(x, chunk_size=2))
    x = jax.ShapeDtypeStruct((2, 4, 3), jnp.float32)
    for platform in ("cuda", "rocm"):
        pooled.trace(x).lower(lowering_platforms=(platform,))
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA A100-SXM4-80GB")):
        pooled.trace(x).lower(lowering_platforms=("cuda",))
    assert seen == [Target("cuda", "NVIDIA X1000", 120), Target("rocm"), Target("cuda", "NVIDIA A100-SXM4-80GB")]
    assert [target.core_count for target in seen] == [170, None, 108]


def test_a_kernel_that_is_kept_is_of_as_many_multiprocessors(with_gpu):
    """Of two GPUs with the same name, such as parts of a GPU, neither gets kernels lowered for the other."""
    programs, heads = [], jax.ShapeDtypeStruct((1, 2048, 16, 64), jnp.bfloat16)  # more tiles than multiprocessors
    for core_count in (132, 100):
        with_gpu(gpu("NVIDIA H100 80GB HBM3", "9.0", core_count))
        attention = jax.jit(lambda q: ejkernel.lax.flash_attention(q, q, q, causal=True))
        lowered = attention.trace(heads).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in lowered
        programs.append(lowered)
    assert programs[0] != programs[1]


def test_a_program_for_a_mesh_of_gpus_that_are_not_here_is_for_their_kind():
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA A100-SXM4-80GB")):
        assert target_of("cuda") == Target("cuda", "NVIDIA A100-SXM4-80GB") and target_of("rocm") == Target("rocm")
        assert target_of("cpu") == device_target()


def test_explain_says_why_a_program_for_rocm_is_xlas_where_there_is_no_such_gpu():
    found = ejkernel.explain("flash_attention", *CALLS["flash_attention"], target="rocm")
    assert found.config.platform == Platform.XLA
    assert "jax-triton compiles for rocm only on a machine with an AMD GPU" in str(found)
    lowered = jax.jit(ejkernel.lax.flash_attention).trace(*CALLS["flash_attention"]).lower(lowering_platforms=("rocm",))
    assert "triton" not in lowered.as_text()


@pytest.mark.parametrize("kind, processors", [(None, 132), ("NVIDIA H200", 132), ("NVIDIA H100 PCIe", 114)])
def test_persistent_kernels_have_a_block_for_each_multiprocessor(kind, processors):
    from ejkernel.kernels._pallas.gpu.flash_attention.plan import Plan
    from ejkernel.kernels._pallas.gpu.flash_attention.problem import problem_of
    from ejkernel.kernels._pallas.gpu.grouped_matmul.matrices import Plan as Matrices
    from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

    problem = problem_of(Operands(*CALLS["flash_attention"]), FlashAttentionSpec(causal=True))
    with lowering_for(Target("cuda", kind)):
        attention = Plan(problem, 128, 128, 2).scheduler
        matrices = Matrices(64, 1024, 1024, 256, 64, 3, np.dtype("float16"))
    assert matrices.blocks == processors == attention.processors and attention.blocks <= processors
