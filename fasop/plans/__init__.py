"""What is planned: ``Shape`` (the parallel degrees), the ``Block`` of nodes that stages are placed on, and
``Plan``, one complete configuration with its estimate. A file of plans goes in, or a search's result; a file
of plans comes out, which every later command reads.
"""
