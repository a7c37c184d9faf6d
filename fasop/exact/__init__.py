"""The ``exact`` cost model. A model, a cluster, unit costs and a shape go in; tables come out that give, for
any stage of consecutive units on any GPU types, the seconds of its computation, messages and gradient
reduction and the bytes of its memory.
"""
