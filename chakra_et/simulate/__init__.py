"""Replay .et files from durations and dependencies alone: columns in, start and end times out.

``joint`` joins the ranks into one graph, ``matching`` matches their communication nodes, ``simulators`` runs
the graph as the devices did or as ASTRA-sim does, ``report`` compares the result with the measurement.
"""
