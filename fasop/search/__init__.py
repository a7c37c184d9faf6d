"""The search for the best plan. Model, clusters, costs and a goal in; plans out, best first. Shapes are
bounded (``planner``), placed and partitioned by a dynamic program over the nodes used so far
(``node_counts``, ``dynamic_program``, ``partition``), improved (``improve``) and ranked (``search``).
"""
