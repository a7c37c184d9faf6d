"""The causal graph of one rank: host and device columns in, nodes and dependency edges out.

In order: ``link`` matches the two traces, ``timeline`` gives each event a thread or stream, ``communication``
says what each communication event is, the ``dependencies`` modules find why each piece of work started when
it did, ``build`` makes nodes and edges of it. Each stage returns its own value and leaves its inputs alone.
"""
