"""Which tests run on every change in a run of all tests; the rest is slow.

* The core.
* Of the tests in a file of `transforms/` that are generated for calls of an operation one, and for the next operation
  one of another test: so every operation is under every transform, and in as many of its calls as there are such tests.
  Where the core has the operation in the file, only a call that runs nowhere else is added.
* One in ten of the parameters of any other test, other ones for another test.

On the newest jax the core leaves out what runs on the oldest: in the folders in which XLA compiles most, half of the
tests of each operation in a file, of the next operation the other half. `bash .ci/run nightly` has them on both.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest

ONE_IN = 10
COMPILED_MOST = ("transforms", "ring_attention")
ByTest = dict[str, list[pytest.Item]]


def rest(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that do not, of those that have no mark."""
    has = lambda item, *names: any(item.get_closest_marker(name) for name in names)
    unmarked = [item for item in items if not has(item, "core", "slow", "gpu")]
    core = [item for item in items if has(item, "core")]
    of_calls = [item for item in unmarked if _operation(item)]
    others = _by_test(set_aside := [item for item in unmarked if not _operation(item)])
    kept = {item for test, of_one in others.items() for item in of_one[_first(test, len(of_one)) :: ONE_IN]}
    return {*of_calls, *set_aside} - kept - _calls(of_calls, core)


def halved(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests of the core that run on the newest jax only at night, but for tests that would not run there at all."""
    found = defaultdict(list)
    for item in items:
        if item.get_closest_marker("core") and item.path.parent.name in COMPILED_MOST:
            found[item.path, _operation(item) or _test(item)].append(item)
    left = {item for number, of_one in enumerate(found.values()) for item in of_one[number % 2 :: 2]}
    kept = {_test(item) for of_one in found.values() for item in of_one if item not in left}
    return {item for item in left if _test(item) in kept}


def _calls(items: Sequence[pytest.Item], core: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of the tests of transforms that run, at least one of each test."""
    place = lambda item: (item.path, _operation(item))
    in_core, run, calls = {place(item) for item in core}, Counter(map(_call, core)), defaultdict(list)
    for item in items:
        calls[place(item)].append(item)
    kept = _one_of_each([_by_test(of_one) for key, of_one in calls.items() if key not in in_core], run)
    kept |= _one_of_each([_by_test(of_one) for key, of_one in calls.items() if key in in_core], run, if_new=True)
    without = _by_test(items).keys() - _by_test(kept).keys()
    return kept | {of_one[0] for test, of_one in _by_test(items).items() if test in without}


def _one_of_each(calls: Iterable[ByTest], run: Counter, if_new: bool = False) -> set[pytest.Item]:
    """For each operation in a file a test with the call that has run least, of the test that fewest others have."""
    kept, taken = set(), Counter()
    for by_test in calls:
        least = min(run[_call(item)] for of_one in by_test.values() for item in of_one)
        if if_new and least:
            continue
        with_it = _by_test([x for of_one in by_test.values() for x in of_one if run[_call(x)] == least])
        test = min(with_it, key=taken.__getitem__)
        kept.add(item := with_it[test][0])
        taken[test] += 1
        run[_call(item)] += 1
    return kept


def _by_test(items: Iterable[pytest.Item]) -> ByTest:
    found = defaultdict(list)
    for item in items:
        found[_test(item)].append(item)
    return found


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _first(test: str, count: int) -> int:
    """The first of the parameters: of another test another one, in every process the same."""
    return zlib.crc32(test.encode()) % min(ONE_IN, count)


def _call(item: pytest.Item):
    """The call for which a test of transforms is generated, or the operation; None for other tests."""
    params = getattr(item, "callspec", None) and item.callspec.params
    return params.get("case", params.get("operation")) if params and item.path.parent.name == "transforms" else None


def _operation(item: pytest.Item) -> str | None:
    return getattr(_call(item), "operation", _call(item))
