"""Repair trace files: damaged JSON in, JSON that parses out, with a list of every change.

``file.repair_file`` reads a file twice, once to find its documents (``scan``, ``records``, ``stripes``) and
once to write the one that is kept (``mend``, ``write``). A file that needs no repair is never touched.
"""
