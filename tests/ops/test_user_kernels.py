"""A user's kernel under the transforms of JAX: each gives the same as for the plain function."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Kernel
from tests.ops.products import A, B, Config, Product, executor, ours, plain, same


class ProductWithItsOwnVjp(Product):
    """The same with a hand-written backward pass, which is never traced only for its shapes."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        a, b, *_ = primals
        product, rows, scale = cotangents[1], cotangents[2], kwargs.get("scale", 1.0)
        da = jnp.cos(a) * (product @ b.T) * scale + rows[:, None]
        return (da, jnp.sin(a).T @ product * scale, *[None] * (len(primals) - 2))


KERNELS = [Product(), ProductWithItsOwnVjp()]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def loss(function):
    def of(*args):
        out = function(*args)
        return (out["product"] ** 2).sum() + jnp.tanh(out["rows"]).sum()

    return of


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@kernels
def test_evaluation(kernel, transform):
    same(transform(ours(kernel, scale=2.0))(A, B, jnp.int32(3)), plain(A, B, 3, scale=2.0))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (2, 0)])
@kernels
def test_vmap(kernel, axes):
    stacked = [x if axis is None else np.stack([x, 2 * x], axis) for x, axis in zip((A, B), axes, strict=True)]
    same(jax.vmap(ours(kernel), axes)(*stacked), jax.vmap(plain, axes)(*stacked))


@kernels
def test_vmap_of_vmap(kernel):
    b = np.stack([B, -B, 2 * B])
    a = np.stack([A, 2 * A])
    twice = lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    same(twice(ours(kernel))(a, b), twice(plain)(a, b))


@kernels
def test_jvp(kernel):
    at, towards = (A, B), (np.cos(A), np.cos(B))
    drop_index = lambda f: lambda *args: {name: x for name, x in f(*args).items() if name != "index"}
    same(jax.jvp(drop_index(ours(kernel)), at, towards), jax.jvp(drop_index(plain), at, towards))


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@kernels
def test_grad(kernel, wrt, transform):
    same(transform(jax.grad(loss(ours(kernel)), wrt))(A, B, 2), jax.grad(loss(plain), wrt)(A, B, 2))


@kernels
def test_grad_of_a_single_result(kernel):
    rows = lambda f: lambda a: f(a, B)["rows"].sum()
    same(jax.grad(rows(ours(kernel)))(A), np.ones_like(A))


def test_grad_of_one_operand_computes_no_other():
    shown = str(jax.make_jaxpr(jax.grad(loss(ours(Product()))))(A, B))
    assert "product_bwd" in shown and "results=('x0_bar',)" in shown and "product_jvp" not in shown


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@kernels
def test_vmap_of_grad_and_grad_of_vmap(kernel, axes):
    stacked = [x if axis is None else np.stack([x, 2 * x, -x]) for x, axis in zip((A, B), axes, strict=True)]
    per_example = lambda f: jax.vmap(jax.grad(loss(f), (0, 1)), axes)
    summed = lambda f: jax.grad(lambda a, b: jax.vmap(loss(f), axes)(a, b).sum(), (0, 1))
    for gradients in (per_example, summed):
        same(jax.jit(gradients(ours(kernel)))(*stacked), jax.jit(gradients(plain))(*stacked))


@kernels
def test_jacobians(kernel):
    for jacobian in (jax.jacfwd, jax.jacrev):
        of = lambda f, jacobian=jacobian: jax.jit(jacobian(lambda a, b: f(a, b)["product"], (0, 1)))(A, B)
        same(of(ours(kernel)), of(plain))


@kernels
def test_second_order(kernel):
    hessian = lambda f: jax.jit(jax.hessian(loss(f)))(A, B)
    same(hessian(ours(kernel)), hessian(plain), rtol=1e-4)
    grad_of_grad = lambda f: jax.jit(jax.grad(lambda a: (jax.grad(loss(f))(a, B) ** 2).sum()))(A)
    same(grad_of_grad(ours(kernel)), grad_of_grad(plain), rtol=1e-4)


@kernels
def test_hessian_vector_product_of_vmap(kernel):
    stacked = np.stack([A, 2 * A])
    gradient = lambda f: jax.grad(lambda a: jax.vmap(loss(f), (0, None))(a, B).sum())
    product = lambda f: jax.jit(lambda a: jax.jvp(gradient(f), (a,), (a,))[1])(stacked)
    same(product(ours(kernel)), product(plain), rtol=1e-4)


@kernels
def test_checkpoint_scan_and_linearize(kernel):
    layer = lambda f: lambda a, b: (jnp.tanh(f(a, b)["product"][:, :4]), None)
    deep = lambda f: lambda a: jax.lax.scan(jax.checkpoint(layer(f)), a, np.stack([B, B, B]))[0].sum()
    for derivative in (jax.grad, lambda f: lambda a: jax.linearize(f, a)[1](a)):
        same(jax.jit(derivative(deep(ours(kernel))))(A), jax.jit(derivative(deep(plain)))(A))


def test_operands_may_be_trees_and_given_by_name():
    class Tree(Product):
        def run(self, pair, *, cfg, shift=0.0):
            return pair["a"] @ pair["b"] + shift

    call = lambda a, shift: executor(Tree(), {"a": a, "b": B}, shift=shift).sum()
    da, dshift = jax.grad(call, (0, 1))(jnp.asarray(A), jnp.ones(5))
    same((da, dshift), (jnp.broadcast_to(B.sum(1), (3, 4)), jnp.full(5, 3.0)))


@pytest.mark.parametrize(
    "derivative", (jax.grad, lambda f: jax.grad(jax.grad(f)), lambda f: lambda x: jax.vjp(f, x)[0])
)
def test_an_operand_may_be_a_number_of_python(derivative):
    """Of which JAX makes no array before it is differentiated."""
    of = lambda f: derivative(lambda scale: f(scale)["product"].sum())
    found = of(lambda scale: executor(Product(), A, B, scale=scale))(3.0)
    same(found, of(lambda scale: plain(A, B, scale=scale))(3.0))


def test_one_and_one_point_zero_are_different_calls():
    class Doubled(Product):
        def run(self, a, *, cfg, by):
            return a * by

    run = lambda by: executor(Doubled(), jnp.arange(3), by=by).dtype
    assert (run(1), run(1.0), run(True), run(1)) == (jnp.int32, jnp.float32, jnp.int32, jnp.int32)


# --- What the primitive shows


def test_the_config_is_a_parameter_of_the_primitive():
    shown = str(jax.make_jaxpr(lambda a, b: executor(Product(), a, b, cfg=Config(block=7)))(A, B))
    assert "product[" in shown and "config=Config(block=7)" in shown


def test_equal_kernels_share_compiled_programs():
    traced = []

    class Traced(Product):
        def run(self, a, *, cfg):
            traced.append(a)
            return a + 1

    for _ in range(3):
        executor(Traced(), jnp.ones(3))
    once = len(traced)
    executor(Traced(), jnp.ones(3))
    assert len(traced) == once


# --- What made the cotangent


def loss_of_gradient(call, axes=None, outer=None):
    """A function of the inputs to the cotangents of `call`: the transpose of a gradient is the tangent."""

    def loss(weights, a, b):
        def scalar(a, b):
            results = call(a, b)
            return (results["product"] * weights).sum() + (results["rows"] ** 2).sum()

        gradient = jax.grad(scalar, (0, 1))
        for in_axes in (axes, outer):
            gradient = gradient if in_axes is None else jax.vmap(gradient, in_axes)
        return sum((x**2).sum() for x in jax.tree.leaves(gradient(a, b)))

    return loss


MAPPED = {
    "one example": (None, None, A, B),
    "both mapped": ((0, 0), None, np.stack([A, 2 * A]), np.stack([B, -B])),
    "the last axis": ((2, None), None, np.stack([A, 2 * A], -1), B),
    "one mapped": ((None, 0), None, A, np.stack([B, -B])),
    "twice": ((0, None), (None, 1), np.stack([A, 2 * A]), np.stack([B, -B, B / 2], 1)),
}


@pytest.mark.parametrize("axes, outer, a, b", MAPPED.values(), ids=MAPPED)
def test_reverse_over_reverse(axes, outer, a, b):
    weights = np.random.default_rng(2).standard_normal((3, 5)).astype("float32")
    right, found = (
        jax.grad(loss_of_gradient(call, axes, outer), (0, 1, 2))(weights, a, b) for call in (plain, ours(Product()))
    )
    same(found, right, rtol=1e-4)


# --- Errors


def test_a_platform_is_refused_unless_it_is_an_option():
    """What a program is lowered for decides which method runs."""
    says = r"product: platform is given, which run does not take; .* run_triton, run_cuda, run_cute on cuda; "
    for call in (lambda: executor(Product(), A, B, platform="cuda"), lambda: Product()(A, B, platform="cuda")):
        with pytest.raises(TypeError, match=says):
            call()

    class Placed(Product):
        def run(self, a, *, cfg, platform="none"):
            return a + len(platform)

    same(executor(Placed(), A, platform="cuda"), A + 4)


def test_an_option_has_to_be_hashable():
    with pytest.raises(TypeError, match=r"product: .* have to be hashable"):
        executor(Product(), A, B, scale={1, 2})


@pytest.mark.parametrize(
    "gradients, error, message",
    [
        ((0.0, 0.0, None), ValueError, r"shape \(\) to array 0 of \(3, 4\)"),
        ((None,), TypeError, "has to return 3 gradients"),
    ],
)
def test_results_of_custom_vjp_are_checked(gradients, error, message):
    class Wrong(Product):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return gradients

    with pytest.raises(error, match=message):
        jax.grad(loss(ours(Wrong())))(A, B, 1)


def test_an_array_by_name_has_no_custom_gradient():
    class ByName(ProductWithItsOwnVjp):
        def run(self, a, *, b, cfg):
            return plain(a, b)

    with pytest.raises(TypeError, match="pass them by position"):
        jax.grad(lambda b: executor(ByName(), A, b=b)["product"].sum())(B)


@pytest.mark.parametrize("transform", (jax.jit, jax.vmap, jax.grad))
def test_a_traced_array_has_to_be_an_operand(transform):
    """Its gradient, or the axis that is mapped, would be lost."""

    def call(w):
        class Captured(Product):
            def run(self, a, *, cfg):
                return a @ w

        return executor(Captured(), A).sum()

    with pytest.raises(
        TypeError, match=r"product: run reads arrays that are traced outside of it; .* \(array 0: f32\["
    ):
        transform(call)(np.stack([B, B]) if transform is jax.vmap else B)


def test_a_kernel_without_run_says_so():
    class Empty(Kernel[Config, jax.Array]):
        def heuristic_cfg(self, inv):
            return Config()

    with pytest.raises(NotImplementedError, match="empty: a kernel needs run"):
        executor(Empty("empty"), A)
