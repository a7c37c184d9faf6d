"""Convert: the traces of one rank, or of every run in a folder, in; .et files and a report out.

``pair`` converts one rank in memory, ``rank`` its files (repairing damaged ones first), ``runs`` whole
folders on several processes; ``emit`` lays a graph out as .et columns and ``report`` counts every loss.
"""
