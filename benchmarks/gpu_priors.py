"""Where the fit of ``fit_gpus.py`` starts: parts of specified rates, times in µs, counts per µs and unit."""

from __future__ import annotations

GPUS = ("H100", "MI300X")
# (H100, MI300X, standard deviation of the logarithm). What has no source is assumed.
PRIORS: dict[str, tuple[float, float, float]] = {
    # H100: at most 780 of 989 TFLOP/s (gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405). MI300X:
    # about 45 % of its peak (Ambati et al., arXiv:2510.27583, 2025, read in a summary); 564 TFLOP/s for 4096³
    # with the best kernel of hipBLASLt (a public guide to tuning it, read in a search's excerpt, 2026).
    # MI300X: 4.2 of 5.3 TB/s (ROCm/legacy-rocm-build#5070).
    # H100: a line per cycle of 1.83 GHz, the clock of its specified rates. MI300X: 368 µs for 4097³, of which
    # 45 are the first loads and the stores by ``moves`` (AMD-AGI/TraceLens,
    # evals/unit_tests/gemm/gemm_03_compute_misaligned, 30a7e81f).
    # What a product takes beyond those that wait in a queue; in the fit of AMD's it is part of them.
    "matrix product.launch": (2.0, 0.01, 0.3),
    "matrix product.moves": (1830.0, 3600.0, 0.15),
    # H100: FlashAttention-2 reaches 282 to 324 TFLOP/s with a head size of 64, 309 to 370 with 128 (Shah et
    # al., FlashAttention-3, arXiv:2407.08608, 2024, forward speed). MI300X: 313 TFLOP/s for 32 heads of 128
    # and 32,768 tokens (AMD-AGI/TraceLens, evals/unit_tests/attention/sdpa_01_long_seq_low_eff, e777082e).
    "attention.compute": (0.35, 0.24, 0.2),
    # H100: two blocks of a head size of 64 share a multiprocessor at 321 TFLOP/s (there), and one alone takes
    # as long. MI300X: 97.2 - 40.5 µs for 512 - 128 keys (pytorch/pytorch#122857), 151 for 1024; and as on
    # H100, 130 by attention.compute and a head size of 128: the mean of both.
    "attention.keys": (27.0, 140.0, 0.4),
    # Assumed: for masks, PyTorch takes the kernel of xFormers on H100, and on MI300X the same Triton kernel.
    "attention.masked": (0.6, 0.9, 0.3),
    "attention.launch": (3.5, 4.0, 0.3),
    "convolution.compute": (0.5, 0.3, 0.5),
    "convolution.thin": (0.05, 0.05, 1.0),
    "convolution.launch": (10.0, 20.0, 0.5),
    # In 32 bits: NeuSight's A100, V100 and T4 (cost_accuracy.py --kinds moving fits and judges them).
    "softmax.memory": (0.75, 0.75, 0.05),
    "softmax_long.memory": (0.85, 0.85, 0.05),
    "softmax_long.held": (0.25, 0.25, 0.05),
    "softmax_long.rise": (0.46, 0.46, 0.05),
    "softmax_long.odd": (0.25, 0.25, 0.05),
    "normalization.memory": (0.88, 0.88, 0.05),
    "normalization.held": (0.19, 0.19, 0.05),
    "normalization.rise": (1.0, 1.0, 0.05),
    # Assumed: two elements per cycle and unit, one in long rows, which are read again.
    "softmax.elements": (3700.0, 3700.0, 0.5),
    "softmax_long.elements": (1800.0, 1800.0, 0.5),
    # H100: 50 shapes on an H200 by the doctor. Each row waits for two sums; no such effect shows on MI300X.
    "normalization.elements": (4670.0, 2600.0, 0.5),
    "normalization.row": (2.05, 0.01, 0.1),
    "softmax.launch": (1.7, 3.0, 0.3),
    "normalization.launch": (0.86, 3.5, 0.3),
    "copy.launch": (2.0, 3.0, 0.3),
    "gather.elements": (1100.0, 1200.0, 0.3),
    "gather.launch": (2.5, 3.0, 0.3),
    "reduction.memory": (0.6, 0.5, 0.4),
    "reduction.launch": (3.2, 4.0, 0.3),
    "elementwise.memory": (0.87, 0.78, 0.1),
    "elementwise.launch": (1.7, 2.5, 0.3),
    # The same code on both: a unit of either runs 128 threads at about 2 GHz.
    "strided.elements": (2600.0, 2600.0, 0.2),
    # H100: assumed, one in two cycles. MI300X: lines of 128 bytes at the 17 TB/s of its Infinity Cache
    # (servethehome.com, AMD Instinct MI300X launch, 2023).
    "strided.lines": (1000.0, 440.0, 0.4),
    "joined.elements": (1400.0, 1400.0, 0.3),
    "special.elements": (4000.0, 2600.0, 0.4),
    "special.more": (0.2, 1.5, 0.4),
    # What is found in the cache (H100), and what a launch in a queue takes (MI300X).
    "cache.speedup": (1.4, 1.0, 0.2),
    "queue.least": (1.5, 4.5, 0.1),
    "queue.more": (0.05, 0.5, 0.5),
}
