"""The buckets in which DistributedDataParallel reduces gradients, by PyTorch's own rule.

>>> buckets_of([30, 30, 30], ["float"] * 3, limit=50, first=20)
[[0], [1, 2]]

A bucket takes gradients of one type, in the order in which they become ready, until it holds as many bytes as
its limit: 1 MiB for the first of a type, ``bucket_cap_mb`` (25) for the others. Source: torch, reducer.cpp,
compute_bucket_assignment_by_size.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_MIB, OTHERS_MIB = 1, 25
"""DDP's limits where bucket_cap_mb isn't given (torch.nn.parallel.distributed)."""
_MOST_MIB = 1024


def buckets_of(sizes: Sequence[int], types: Sequence[str], limit: float, first: float) -> list[list[int]]:
    """The gradients of each bucket, by their places in the order in which they become ready.

    ``sizes``: bytes; ``types``: of their elements; ``limit``: bytes at which a bucket is closed; ``first``:
    those of the first bucket of a type.
    """
    open_of: dict[str, list[int]] = {}
    filled: set[str] = set()
    done: list[list[int]] = []
    for at, of in enumerate(types):
        bucket = open_of.setdefault(of, [])
        bucket.append(at)
        if sum(sizes[each] for each in bucket) >= (limit if of in filled else first):
            done.append(open_of.pop(of))
            filled.add(of)
    return sorted([*done, *open_of.values()])


def limits_of(sizes: Sequence[int], types: Sequence[str], buckets: Sequence[int]) -> tuple[int, int] | None:
    """DDP's limits in bytes, of the first bucket and of all others, that make buckets of these bytes of these
    gradients; None where none do.

    1 and 25 MiB where that fits, else the smallest whole MiB: for all buckets, as with ``bucket_cap_mb``, or
    behind a first one of 1 MiB.
    """
    mib = 1 << 20
    whole = range(1, min(-(-sum(sizes) // mib), _MOST_MIB) + 1)
    tried = [(FIRST_MIB, OTHERS_MIB), *((n, n) for n in whole), *((FIRST_MIB, n) for n in whole)]
    for first, limit in tried:
        made = buckets_of(sizes, types, limit * mib, first * mib)
        if [sum(sizes[at] for at in bucket) for bucket in made] == list(buckets):
            return first * mib, limit * mib
    return None
