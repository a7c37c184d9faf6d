"""The time of communication on a given network: topology and bytes in, nanoseconds out.

``units`` parses bandwidths and times with their units, ``presets`` the GPUs and nodes in ``presets.json``
(each with its source), ``topology`` the dimensions of a network from one line of text or JSON.
``collectives`` has the α–β–γ model: α ns per message, β per byte and γ per reduced byte; ``fit`` finds the
three from measured collectives, and reads and writes them. None needs an execution trace.
"""
