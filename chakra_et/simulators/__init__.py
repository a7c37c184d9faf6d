"""From a set of .et files to a simulation that runs.

In goes a set (NAME.0.et …, NAME_comm_groups.json and, where there is one, NAME_manifest.json) with a network;
out comes a folder with everything that ASTRA-sim reads and what it should answer. ``sets`` reads, ``trim``
leaves missing ranks out, ``prepare`` makes each rank's nodes what the simulator runs, ``dimensions`` is its
network, ``expected`` replays, ``bundle`` and ``texts`` write, ``check_log`` compares a log; ``edit`` makes
new traces from given ones. ``astra`` is the command.
"""
