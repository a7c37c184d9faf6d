"""From where the fit of ``fit_gpus.py`` starts: parts of specified rates, and times in µs."""

from __future__ import annotations

GPUS = ("H100", "MI300X")
# (H100, MI300X, standard deviation of the logarithm). What has no source is assumed.
PRIORS: dict[str, tuple[float, float, float]] = {
    # H100: at most 780 of 989 TFLOP/s (gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405). MI300X:
    # about 45 % of its peak (Ambati et al., arXiv:2510.27583, 2025, read in a summary).
    "matrix product.compute": (0.75, 0.45, 0.2),
    # MI300X: 4.2 of 5.3 TB/s (ROCm/legacy-rocm-build#5070).
    "matrix product.memory": (0.87, 0.78, 0.1),
    "matrix product.unaligned": (0.35, 0.35, 0.5),
    "matrix product.launch": (4.0, 4.0, 0.3),
    "matrix product.depth": (5.0, 1.5, 0.4),
    "matrix product.split": (2.0, 2.0, 0.4),
    "matrix product.tile": (0.3, 1.5, 0.5),
    # Flash attention, head size 128. H100: 457 µs for 4096 tokens and 16 heads (pytorch/pytorch#128888).
    # MI300X: 97.2 - 40.5 µs for 512 - 128 keys (pytorch/pytorch#122857); arithmetic as on H100.
    "attention.compute": (0.303, 0.228, 0.2),
    "attention.keys": (50.0, 151.0, 0.5),
    "attention.launch": (2.5, 5.0, 0.4),
    "convolution.compute": (0.4, 0.15, 0.5),
    "convolution.thin": (0.05, 0.05, 1.0),
    "convolution.launch": (10.0, 30.0, 0.5),
    "softmax.memory": (0.6, 0.5, 0.3),
    "softmax.long": (0.3, 0.3, 0.5),
    "softmax.launch": (1.7, 4.5, 0.3),
    "normalization.memory": (0.6, 0.5, 0.4),
    "normalization.launch": (2.5, 4.5, 0.3),
    "copy.memory": (0.8, 0.7, 0.4),
    "copy.launch": (2.0, 4.5, 0.3),
    "gather.memory": (0.6, 0.5, 0.4),
    "gather.launch": (2.5, 4.5, 0.3),
    "reduction.memory": (0.6, 0.5, 0.4),
    "reduction.launch": (3.5, 4.5, 0.3),
    "elementwise.memory": (0.87, 0.78, 0.1),
    "elementwise.launch": (1.7, 4.0, 0.3),
    "scattered.memory": (0.2, 0.15, 0.4),
    # What is found in the cache (H100) and what a launch takes on an idle GPU (MI300X).
    "cache.speedup": (1.4, 1.0, 0.2),
    "idle.less": (0.05, 1.8, 0.3),
}
