"""The published FASOP tool (HPDC 2024), row by row. A model, clusters of A100 and A10 nodes and the published
costs go in; every row that the tool prints comes out, in its order, with its partitions, times and memory.
Its rules are kept as they are, errors included, so nothing here is shared with the ``exact`` cost model.
"""
