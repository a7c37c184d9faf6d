"""When each pipeline stage computes and communicates. Durations of stages and messages go in; the ends of
every computation and message come out (``one_f_one_b``), or a plan goes in and one step comes out as events
(``events``), in this schedule, interleaved or with split backward passes.
"""
