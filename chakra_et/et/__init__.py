"""The Chakra execution trace format: columns in memory, bytes in an .et file.

``columns.ExecutionTrace`` is the type that everything after the conversion works on; ``file`` reads and
writes it without a protobuf library (``encode``, ``decode``, ``wire``, ``schema``); ``edges`` treats its
dependencies as a graph; ``sets`` groups the files of a run.
"""
