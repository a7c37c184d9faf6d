"""What a run would take under changed conditions, from its execution traces.

chakra-et predict outputs/NAME --dp 8 --bandwidth 100Gbit/s
chakra_et.predict(chakra_et.load("outputs/NAME").scale(dp=8))
"""

from chakra_et import make_callable

make_callable(__name__)
