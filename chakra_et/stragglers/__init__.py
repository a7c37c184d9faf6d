"""What slow workers cost: step times against an ideal job in which each operation takes its typical time.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025).
``operations`` is the table that both sources fill: ``parquet`` reads the traces of that paper's artifact,
whose ``dependencies`` ``pipeline`` simulates, and ``recorded`` takes our own .et files, which the joint
device replay simulates. ``analyse`` compares the simulated step times, ``command`` prints them.
"""
