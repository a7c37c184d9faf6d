"""What a run would take under changed conditions, from its execution traces.

    chakra-et predict outputs/NAME --dp 8 --bandwidth 100Gbit/s
    chakra_et.predict(chakra_et.load("outputs/NAME").scale(dp=8))

``predict`` applies the what-ifs of ``chakra_et.transform`` and ``gpu`` to a run of ``chakra_et.simulate`` and
computes when everything happens, jointly over all ranks; ``predict.predict`` also says what bounds each rank
and writes the predicted run; ``measure`` and ``measure_gpu`` measure what it needs to know of a machine.
"""

from chakra_et import make_callable

make_callable(__name__)
