"""Convert traces: those of one rank, or of every run in a folder, in; .et files and a report out.

``pair`` converts one rank in memory, ``rank`` its files (repairing damaged ones first), ``runs`` whole
folders in several processes; ``emit`` turns a graph into .et columns, and ``report`` counts every loss.
"""
