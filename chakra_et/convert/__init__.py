"""Convert traces: those of one rank, or of every run in a folder, in; .et files and a report out.

    chakra-et convert traces/ -o et/
    chakra_et.convert("traces/", output="et/")

``pair`` converts one rank in memory, ``rank`` its files (repairing damaged ones first), ``runs`` whole
folders in several processes; ``emit`` turns a graph into .et columns, and ``report`` counts every loss.
"""

from chakra_et import make_callable

make_callable(__name__)
