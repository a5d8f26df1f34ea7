"""An engine over two devices generates the same text as on one."""

import jax
import pytest

from ejkernel.serving import HEADS, Decoder, Engine, Limits, Sampling, place, random_weights
from tests.serving.engines import LIMITS, all_is_free


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), (HEADS,), devices=jax.devices()[:2])


@pytest.mark.parametrize(
    "dtype", [pytest.param(None, marks=pytest.mark.core), pytest.param("int8", marks=pytest.mark.slow)]
)
def test_two_devices_by_heads_write_the_same_text(decoder, weights, engine, prompts, expected, mesh, dtype):
    limits = Limits(**LIMITS | dict(buckets=(16,)), cache_dtype=dtype)
    split = Engine(decoder, place(weights, mesh), limits, mesh)
    wanted = engine(cache_dtype=dtype).generate(prompts, Sampling(max_tokens=12)) if dtype else expected
    assert split.generate(prompts, Sampling(max_tokens=12)) == wanted and all_is_free(split)
    pages = split._caches[0].pages
    assert pages.addressable_shards[0].data.shape == (64, 8, 2, 8) and pages.shape == (64, 8, 4, 8)

    sizes = split._sizes(16)
    step, _ = split._tables.step([], sizes)
    with jax.set_mesh(mesh):
        program = split._forward.lower(False, sizes, split.weights, split._caches, split._last, step).compile()
    hlo = program.as_text()
    # All-reduces: the embedding, and the attention and MLP of each of two layers; the logits are gathered.
    assert (hlo.count(" all-reduce("), hlo.count(" all-gather(")) == (5, 1)


@pytest.mark.slow
def test_an_embedding_that_is_the_output_matrix_too_is_split_by_the_vocabulary(prompts, mesh):
    decoder, limits = Decoder(64, 32, 4, 2, 8, 64, (None,), tied=True), Limits(**LIMITS | dict(buckets=(16,)))
    of = lambda mesh: random_weights(decoder, jax.random.key(1), mesh=mesh)
    one, split = Engine(decoder, of(None), limits), Engine(decoder, of(mesh), limits, mesh)
    assert split.generate(prompts) == one.generate(prompts)
    assert split.weights["embedding"].addressable_shards[0].data.shape == (32, 32)


@pytest.mark.slow
def test_one_head_of_the_cache_on_a_mesh_of_one_device(prompts):
    decoder, limits = Decoder(64, 32, 4, 1, 8, 64, (None,)), Limits(**LIMITS | dict(buckets=(16,)))
    mesh = jax.make_mesh((1,), (HEADS,), devices=jax.devices()[:1])
    of = lambda mesh: Engine(decoder, random_weights(decoder, jax.random.key(1), mesh=mesh), limits, mesh)
    assert of(mesh).generate(prompts) == of(None).generate(prompts)


def test_a_mesh_that_does_not_divide_the_model_is_refused(decoder, weights):
    for axis, message in ((HEADS, "kv_heads is 2; 4 devices must divide it"), ("x", "it must have one, 'heads'")):
        with pytest.raises(ValueError, match=message):
            Engine(decoder, weights, Limits(**LIMITS), jax.make_mesh((4,), (axis,), devices=jax.devices()[:4]))
