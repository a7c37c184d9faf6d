"""What a run would take under changed conditions, from its execution traces.

``run`` reads all ranks of a run once; ``changes``, ``network``, ``overlap`` and ``gpu`` (by ``gpu_work`` and
``gpu_times``) hold the what-ifs, each of which turns one ``Setting`` into another; ``schedule`` computes when
everything happens, jointly over all ranks; ``predict`` puts them together:

    run = load_run("traces/gpt2")
    prediction = predict(run, [Scale("aten::mm|gemm", 0.5), Network(parse_bandwidth("100 Gbit/s"))])
    for rank in prediction.ranks:
        print(rank.rank, rank.before_ms, rank.after_ms, rank.uncertainty_ms)
"""
