"""A run, or a part of it, in the formats of other tools: Perfetto, Chrome, GraphML, Graphviz, tables.

``window`` chooses nodes; ``perfetto``, ``chrome``, ``graphs`` and ``tables`` each write what was chosen.
"""
