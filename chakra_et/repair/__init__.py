"""Repair trace files: damaged JSON in, valid JSON out, with a list of every change.

``file.repair_file`` finds the objects in a damaged file (``scan``) and writes the one that is kept; a damaged
record is mended by itself (``mend``). An intact file is never touched. JSON libraries that mend text guess at
structure and load the whole of it; here the joints between records are found by the layout of the known
writers (``format``).
"""
