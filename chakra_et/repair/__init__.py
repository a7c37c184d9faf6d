"""Repair trace files: damaged JSON in, valid JSON out, with a list of every change.

``file.repair_file`` reads a damaged file twice: once to find the objects in it (``scan``, ``records``),
once to write the one that is kept (``mend``, ``write``). An intact file is never touched. JSON
libraries that mend text guess at structure and load the whole of it; here the joints between records are
found by the layout of the known writers (``format``), in bounded memory.
"""
