"""What users and measurements provide. YAML and JSON files go in; checked values come out: ``Model`` (sizes
of a transformer), ``Cluster`` (nodes, their GPUs, links and prices) and ``Costs`` (seconds of each unit of a
model on a GPU). Everything that can be wrong in such a file is one ``PlanError``.
"""
