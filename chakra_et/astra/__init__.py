"""From a set of .et files to a folder that ASTRA-sim runs.

In goes a set (NAME.0.et …, NAME_comm_groups.json and, where there is one, NAME_manifest.json).
``trim_ranks`` and ``fill_ranks`` deal with missing ranks, ``prepare`` makes each rank's nodes what the
simulator runs, ``network_dimensions`` has ASTRA-sim's network,
``expected`` replays, ``bundle`` and ``bundle_texts`` write, ``check_log`` compares a log. ``examples``
unpacks the sets in ``data``.
"""
