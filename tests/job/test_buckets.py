"""DDP's buckets: the same as PyTorch's own, for gradients of mixed types and sizes."""

from __future__ import annotations

import numpy as np

from chakra_et.job.gradients import buckets_of, limits_of


def test_buckets_are_those_of_torch() -> None:
    """200 random lists, as the rule of one type for all was wrong for 180 of them."""
    import torch
    from torch.distributed import _compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    generator = np.random.default_rng(3)
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    several = 0
    for _ in range(200):
        first, limit = sorted(generator.integers(1, 26, 2).tolist())
        count = int(generator.integers(1, 80))
        elements = np.exp(generator.uniform(0, np.log(8 << 20), count)).astype(int).tolist()
        kinds = [types[at] for at in generator.integers(0, generator.integers(1, 5), count).tolist()]
        tensors = [
            torch.empty(size, dtype=kind, device="meta") for size, kind in zip(elements, kinds, strict=True)
        ]
        found, _ = _compute_bucket_assignment_by_size(tensors, [first << 20, limit << 20])
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        names = [str(kind) for kind in kinds]
        made = buckets_of(sizes, names, limit << 20, first << 20)
        assert made == [list(bucket) for bucket in found]
        several += len(made) > 2
    assert several > 100


def test_limits_are_found_again_from_the_buckets_that_they_make() -> None:
    generator = np.random.default_rng(4)
    # Where bucket_cap_mb is given, the first bucket is as large as the others.
    for first, limit in ((1, 1), (1, 4), (1, 25), (4, 4)):
        sizes = (4 * generator.integers(1, 3 << 20, 60)).tolist()
        types = ["float"] * len(sizes)
        made = buckets_of(sizes, types, limit << 20, first << 20)
        limits = limits_of(sizes, types, [sum(sizes[at] for at in bucket) for bucket in made])
        assert limits is not None and buckets_of(sizes, types, limits[1], limits[0]) == made
    assert limits_of([10, 20], ["float"] * 2, [10, 20]) is None
