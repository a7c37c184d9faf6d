"""Replay .et files from durations and dependencies alone: columns in, start and end times out.

``joint`` joins the ranks into one graph, ``matching`` matches their communication nodes, ``timing`` puts them
on one clock; ``longest_path`` runs the graph as the devices did, ``replays`` also as ASTRA-sim does, and
``replay_report`` compares the result with the measurement. ``run`` is all that together, for what-ifs.
"""
