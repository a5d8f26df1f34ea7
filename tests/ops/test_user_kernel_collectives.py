"""A user's kernel with collectives over the axis of a `jax.vmap`, and the plain function that it computes."""

import jax
import pytest

from tests.ops.products import A, Product, executor, same


class OverTheAxis(Product):
    """A function with collectives over a mapped axis."""

    def run(self, x, *, cfg):
        return jax.lax.psum(x, "a") * x + jax.lax.axis_index("a")


@pytest.mark.parametrize("mapped", (True, False), ids=("mapped", "unmapped"))
@pytest.mark.parametrize("transform", (lambda f: f, jax.jit), ids=("", "jit"))
def test_collectives_over_the_axis_of_a_vmap(transform, mapped):
    kernel, x = OverTheAxis(), A[0]

    def of(f):
        each = transform(lambda x: f(x if mapped else A[0, 0]))
        return lambda x: jax.vmap(each, axis_name="a")(x)

    call, function = of(lambda x: executor(kernel, x)), of(lambda x: kernel.run(x, cfg=None))
    same(call(x), function(x))
    same(*(jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (call, function)))
    same(*(jax.vmap(f)(A[:2]) for f in (call, function)))
