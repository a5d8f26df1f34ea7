"""The pool: a page is free or used, shared pages have the right contents, and known pages are evicted last."""

import random
from itertools import accumulate

from ejkernel.serving.drafts import Lookup
from ejkernel.serving.pages import PagePool, page_key


def keys_of(*pages):
    return list(accumulate(pages, page_key, initial=b""))[1:]


def consistent(pool, owners):
    counts = [sum(page in pages for pages in owners) for page in range(len(pool.references))]
    assert pool.references == counts
    assert sorted(pool._free) == [page for page, count in enumerate(counts) if count == 0]
    assert pool._pages == {key: page for page, key in pool._keys.items()}


def test_keys_depend_on_the_tokens_and_their_prefix():
    a, b = keys_of((1, 2), (3, 4))
    assert keys_of((1, 2), (3, 4)) == [a, b] and keys_of((3, 4))[0] != b and keys_of((1, 2), (3, 5))[1] != b


def test_a_long_run_of_allocations_shares_and_releases_keeps_every_count():
    rng, pool, owners, contents = random.Random(0), PagePool(12), [], {}
    for _ in range(2000):
        if owners and rng.random() < 0.5:
            pool.release(owners.pop(rng.randrange(len(owners))))
        else:
            texts = [(rng.randrange(3),) for _ in range(rng.randrange(1, 5))]
            keys = keys_of(*texts)
            pages = pool.share(keys)
            assert [contents[page] for page in pages] == keys[: len(pages)]
            own = pool.allocate(len(keys) - len(pages))
            if own is None:
                assert len(keys) - len(pages) > 12 - pool.used
                pool.release(pages)
            else:
                for page, key in zip(own, keys[len(pages) :], strict=True):
                    contents[page] = key
                    pool.register(page, key)
                owners.append(pages + own)
        consistent(pool, owners)
    for pages in owners:
        pool.release(pages)
    consistent(pool, [])
    assert pool.used == 0


def test_known_pages_are_evicted_last_and_from_the_end_of_a_text():
    pool, keys = PagePool(4), keys_of((1,), (2,))
    known, unknown = pool.allocate(2), pool.allocate(2)
    for page, key in zip(known, keys, strict=True):
        pool.register(page, key)
    pool.release(known)
    pool.release(unknown)
    assert set(pool.allocate(2)) == set(unknown)
    assert pool.allocate(1) == [known[1]] and pool.share(keys) == [known[0]]
    assert pool.allocate(1) is None


def test_the_last_continuation_of_the_longest_match_is_proposed():
    lookup = Lookup()
    proposed = lambda *x: lookup.propose(*x).tokens
    assert proposed([1, 2, 3], 4) == []
    assert proposed([1, 2, 3, 9, 1, 2], 2) == [3, 9]
    assert proposed([1, 2, 3, 9, 1, 2, 4, 1, 2], 4) == [4, 1, 2]
    assert proposed([1, 2, 3, 9, 1, 2, 4, 1, 2, 3], 4) == [9, 1, 2, 4]
    assert Lookup().propose([7], 3).tokens == []


def test_continuations_of_several_places_make_a_tree():
    text = [1, 2, 3, 9, 7, 1, 2, 4, 8, 8, 1, 2]
    tree = Lookup().propose(text, 4, 2)
    assert tree == ([4, 8, 3, 9], [-1, 0, -1, 2]) and not tree.is_chain
    assert tree.depths == [0, 1, 0, 1] and tree.ancestors == [0b1, 0b11, 0b100, 0b1100]
    assert tree.accepted([3, 0, 0, 9, 5]) == [2, 3] and tree.accepted([4, 5, 0, 0, 0]) == [0]
    assert tree.accepted([5, 0, 0, 0, 0]) == []
    common = Lookup().propose([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2], 5, 2)
    assert common == ([3, 5, 0, 4, 0], [-1, 0, 1, 0, 3])
