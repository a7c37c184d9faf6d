"""The search for the best plan. A model, clusters, costs and a goal go in; plans come out, best first. Shapes
are bounded (``planner``), placed and partitioned by a dynamic program over the nodes used so far
(``node_counts``, ``dynamic_program``, ``partition``), simulated and improved (``improve``), and ranked
(``search``).
"""
