"""Convert traces: those of one rank, or of every run in a folder, in; .et files and a report out.

chakra-et convert traces/ -o et/
chakra_et.convert("traces/", output="et/")
"""

from chakra_et import make_callable

make_callable(__name__)
