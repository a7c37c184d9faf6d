"""From a set of .et files to a folder that ASTRA-sim runs.

In goes a set (NAME.0.et …, NAME_comm_groups.json and, where there is one, NAME_manifest.json).
``prepare`` leaves ranks out, and makes each rank's nodes what the simulator
runs, ``network_dimensions`` has ASTRA-sim's network, ``bundle`` and ``bundle_texts`` write the folder and
what a run of it should answer, ``command`` compares a log. ``examples`` unpacks the sets in ``data``.
"""
