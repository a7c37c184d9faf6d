"""A run's log folder, read back: ``records`` parses log lines, ``runs`` finds a run's nodes, files and
state.
"""
