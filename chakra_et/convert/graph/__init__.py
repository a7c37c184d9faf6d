"""Build the execution graph of one rank: host and device columns in, nodes and dependency edges out.

In order: ``link`` matches the two traces, ``timeline`` assigns each event to a thread or stream,
``identify_communication`` determines what each communication event is, ``dependencies`` and its modules find
the dependencies of each operator and kernel, and ``build`` makes nodes and edges. ``operators`` tells what
belongs together, and what it does. Each stage returns a value and does not change its inputs.
"""
