"""What slow ranks cost: step times against an ideal job in which each operation takes its typical time.

After "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025).
``recorded`` takes a run apart into a table of operations, and simulates it with other durations on the
schedule of ``simulate``; ``analyse`` compares the step times, ``command`` prints them.
"""
