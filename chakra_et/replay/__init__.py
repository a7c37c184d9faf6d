"""Replay .et files from durations and dependencies alone: columns in, start and end times out.

``joint`` joins the ranks to one graph, ``matching`` pairs their communication, ``simulators`` runs it as the
devices did or as ASTRA-sim does, ``report`` compares the result with what was measured.
"""
