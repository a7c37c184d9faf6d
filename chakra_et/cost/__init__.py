"""The time of communication on a given network: topology and bytes in, nanoseconds out.

``units`` parses bandwidths and times with their units, ``networks`` reads links, nodes and measured
collectives from ``networks.json`` (each with its source), ``topology`` the dimensions of a network from one
line of text or JSON. ``nccl`` has what NCCL takes, ``collectives`` that and the α–β–γ model: α ns per
message, β per byte and γ per reduced byte; ``network_fit`` finds the three from measured collectives. None
needs an execution trace.
"""
