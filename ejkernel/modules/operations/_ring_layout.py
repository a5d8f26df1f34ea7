"""Which tokens of a sequence a device holds, and what of the keys of another device its queries see.

A sequence of `size` equal shards is laid out so:

    contiguous    device d holds the tokens from d·S to (d + 1)·S
    striped       device d holds the tokens d, d + size, d + 2·size, …
    zigzag        device d holds chunk d and chunk 2·size − 1 − d of the 2·size chunks of the sequence, in this order

With a causal mask the first leaves the devices with unequal work, the others do not (striped attention, arXiv
2311.09431). Everything here is of static numbers: a device is one of `size` cases.
"""

from collections.abc import Iterator
from typing import NamedTuple

LAYOUTS = ("contiguous", "striped", "zigzag")


class Run(NamedTuple):
    """Some tokens of a shard that follow each other: `count` from place `start`, at positions first + step·n."""

    start: int
    count: int
    first: int
    step: int


class Part(NamedTuple):
    """A call of attention: the queries and keys of two shards from `begin` to `end`, and the band between them.

    The band is that of `flash_attention`: i' − left ≤ j ≤ i' + right with i' = i + keys − queries, counted in the part.
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
    """The `length` tokens that a device holds, with their positions in the sequence."""
    if layout == "contiguous" or size == 1:
        return (Run(0, length, device * length, 1),)
    if layout == "striped":
        return (Run(0, length, device, size),)
    half = length // 2
    return (Run(0, half, device * half, 1), Run(half, half, (2 * size - 1 - device) * half, 1))


def parts_of(
    q_len: int, kv_len: int, size: int, layout: str, band: Band, q_device: int, kv_device: int
) -> tuple[Part, ...]:
    """The calls that make the attention of the queries of one device to the keys of another; together they are exact.

    Args:
        q_len: the queries of a device.
        kv_len: the keys of a device.
        size: the number of devices.
        layout: one of `LAYOUTS`.
        band: of the whole sequence, where query i is aligned with key i + size·(kv_len − q_len).
        q_device: whose queries.
        kv_device: whose keys.
    """
    causal_alone = band == (None, 0) and q_len == kv_len
    if band == (None, None) or (causal_alone and q_device == kv_device):
        return _some(Part(0, q_len, 0, kv_len, *band))  # the order in a shard is that in the sequence
    shift = size * (kv_len - q_len)
    found = [
        part
        for q in runs(q_len, size, layout, q_device)
        for k in runs(kv_len, size, layout, kv_device)
        for part in between(q._replace(first=q.first + shift), k, band)
    ]
    return _joined(found)


def between(q: Run, k: Run, band: Band) -> tuple[Part, ...]:
    """The call between two runs of one step, without the queries and keys at either end that see and show nothing."""
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
    # Aligned are the last query and the last key of a part.
    left = None if left is None else left + k_end - q_end
    right = None if right is None else right + q_end - k_end
    left = None if left is None or left >= k_end - k_begin - 1 else left
    right = None if right is None or right >= q_end - q_begin - 1 else right
    return _some(Part(q.start + q_begin, q.start + q_end, k.start + k_begin, k.start + k_end, left, right))


def _some(part: Part) -> tuple[Part, ...]:
    return (part,) if part.q_begin < part.q_end and part.k_begin < part.k_end else ()


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Full parts of the same queries, or of the same keys, that follow each other are one."""
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


def hops(q_len: int, kv_len: int, size: int, layout: str, band: Band) -> Iterator[tuple[int, list[tuple[Part, ...]]]]:
    """The hops of a ring at which some device sees something, 0 among them, with the parts of each device.

    At hop t device d has the keys of device d − t.
    """
    for hop in range(size):
        of_devices = [parts_of(q_len, kv_len, size, layout, band, d, (d - hop) % size) for d in range(size)]
        if hop == 0 or any(of_devices):
            yield hop, of_devices
