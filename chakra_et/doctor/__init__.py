"""Whether this project is right on this machine: captures, predictions and kernel times against measurements.

    chakra-et doctor -o doctor --part what-ifs

``workload`` runs small models with or without recording, ``captures`` and ``kernels`` check what comes of
them, ``results`` keeps what was found as JSON and as a page. From a checkout, scripts/gpu_check.sh adds the
training scripts, the planner and the peers. Without a GPU the same parts run on the CPU, as a rehearsal.
"""
