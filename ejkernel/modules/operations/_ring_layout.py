"""Which tokens of a sequence each device holds, and which keys of another device its queries see.

The layouts of a sequence over `size` devices, with S tokens each:

    contiguous    device d holds the tokens from d·S to (d + 1)·S
    striped       device d holds the tokens d, d + size, d + 2·size, …
    zigzag        device d holds chunk d and chunk 2·size − 1 − d of the 2·size chunks of the sequence, in this order

With a causal mask the work of devices is unequal in the first layout and equal in the others (striped attention, arXiv
2311.09431). All numbers here are static; the parts are computed for each of the `size` devices.
"""

from collections.abc import Iterator
from typing import NamedTuple

LAYOUTS = ("contiguous", "striped", "zigzag")


class Run(NamedTuple):
    """Consecutive tokens of a shard: `count` of them from index `start` on, at positions first + step·n."""

    start: int
    count: int
    first: int
    step: int


class Part(NamedTuple):
    """A call of attention: ranges of queries and keys in two shards, and the band between them.

    The band is as in `flash_attention`: i' − left ≤ j ≤ i' + right with i' = i + keys − queries, relative to the part.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None


Band = tuple[int | None, int | None]


def runs(length: int, size: int, layout: str, device: int) -> tuple[Run, ...]:
    """The runs of the `length` tokens that a device holds."""
    if layout == "contiguous" or size == 1:
        return (Run(0, length, device * length, 1),)
    if layout == "striped":
        return (Run(0, length, device, size),)
    half = length // 2
    return (Run(0, half, device * half, 1), Run(half, half, (2 * size - 1 - device) * half, 1))


def place(length: int, size: int, layout: str, device: int, begin: int) -> int:
    """The position in the sequence of a device's token of index `begin`."""
    run = next(run for run in runs(length, size, layout, device) if run.start <= begin < run.start + run.count)
    return run.first + run.step * (begin - run.start)


def parts_of(
    q_len: int, kv_len: int, size: int, layout: str, band: Band, q_device: int, kv_device: int, in_runs: bool = False
) -> tuple[Part, ...]:
    """The parts that together are the exact attention of the queries of one device to the keys of another.

    Args:
        q_len: the number of queries on each device.
        kv_len: the number of keys on each device.
        size: the number of devices.
        layout: one of `LAYOUTS`.
        band: the band of the whole sequence, where query i is aligned with key i + size·(kv_len − q_len).
        q_device: the device of the queries.
        kv_device: the device of the keys.
        in_runs: whether the queries of a part, and its keys, have to be of one run.
    """
    causal_alone = band == (None, 0) and q_len == kv_len
    if not in_runs and (band == (None, None) or (causal_alone and q_device == kv_device)):
        return _some(Part(0, q_len, 0, kv_len, *band))  # the order in a shard is that in the sequence
    shift = size * (kv_len - q_len)
    found = [
        part
        for q in runs(q_len, size, layout, q_device)
        for k in runs(kv_len, size, layout, kv_device)
        for part in between(q._replace(first=q.first + shift), k, band)
    ]
    return tuple(found) if in_runs else _joined(found)


def between(q: Run, k: Run, band: Band) -> tuple[Part, ...]:
    """The part between two runs of the same step, without fully masked queries and keys at their ends."""
    left, right = band
    distance = q.first - k.first
    # In steps: query a sees key b where a − left ≤ b ≤ a + right. Either bound may be negative.
    left = None if left is None else (left - distance) // q.step
    right = None if right is None else (right + distance) // q.step
    k_begin = 0 if left is None else max(0, -left)
    k_end = k.count if right is None else min(k.count, q.count + right)
    q_begin = 0 if right is None else max(0, k_begin - right)
    q_end = q.count if left is None else min(q.count, k_end + left)
    if k_begin >= k_end or q_begin >= q_end or (None not in (left, right) and left + right < 0):
        return ()
    # In a part the last query is aligned with the last key.
    left = None if left is None else left + k_end - q_end
    right = None if right is None else right + q_end - k_end
    left = None if left is None or left >= k_end - k_begin - 1 else left
    right = None if right is None or right >= q_end - q_begin - 1 else right
    return _some(Part(q.start + q_begin, q.start + q_end, k.start + k_begin, k.start + k_end, left, right))


def _some(part: Part) -> tuple[Part, ...]:
    return (part,) if part.q_begin < part.q_end and part.k_begin < part.k_end else ()


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """The parts, with consecutive full parts of the same queries, or of the same keys, joined to one."""
    for n, a in enumerate(parts):
        for b in parts[n + 1 :]:
            if a.is_full and b.is_full and (whole := _union(a, b)):
                return _joined([whole, *(x for x in parts if x not in (a, b))])
    return tuple(sorted(parts[:], key=lambda part: part[:4]))


def _union(a: Part, b: Part) -> Part | None:
    if a[:2] == b[:2] and a.k_end == b.k_begin:
        return Part(*a[:2], a.k_begin, b.k_end)
    if a[2:4] == b[2:4] and a.q_end == b.q_begin:
        return Part(a.q_begin, b.q_end, *a[2:4])
    return None


def hops(
    q_len: int, kv_len: int, size: int, layout: str, band: Band, in_runs: bool = False
) -> Iterator[tuple[int, list[tuple[Part, ...]]]]:
    """(t, the parts of each device) for each hop t of a ring in which some pair is visible, and for t = 0.

    At hop t device d has the keys of device d − t.
    """
    for hop in range(size):
        of_devices = [parts_of(q_len, kv_len, size, layout, band, d, (d - hop) % size, in_runs) for d in range(size)]
        if hop == 0 or any(of_devices):
            yield hop, of_devices
