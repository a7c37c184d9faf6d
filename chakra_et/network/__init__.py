"""How long communication takes on a named network: topology and bytes in, nanoseconds out.

``units`` reads bandwidths and times with their units, ``presets`` the GPUs and nodes of ``presets.json``
(each with its source), ``topology`` the dimensions of a network from one line of text or JSON, and
``collectives`` has the α–β–γ model: each message costs α ns and each byte β, each reduced byte γ. Everything
is pure; nothing here knows execution traces beyond the names of the collectives.
"""
