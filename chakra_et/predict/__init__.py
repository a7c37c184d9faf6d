"""What a run would take under changed conditions, from its execution traces.

``run`` reads all ranks of a run once. ``changes``, ``network``, ``overlap``, ``resize``, ``threads`` and
``gpu`` (by ``gpu_work`` and ``gpu_times``) hold the what-ifs that turn one ``Setting`` into another;
``layers``, ``ranks``, ``buckets``, ``accumulate`` and ``shard`` (by ``fsdp_units``, ``fsdp_nodes`` and
``fsdp_optimizer``) those that make a run with other nodes, with ``ddp``, ``insert``, ``edit`` and
``rebuild``. ``schedule`` computes when everything happens, jointly over all ranks; ``predict`` puts them
together:

    run = load_run("traces/gpt2")
    prediction = predict(run, [Scale("aten::mm|gemm", 0.5), Network(parse_bandwidth("100 Gbit/s"))])
    for rank in prediction.ranks:
        print(rank.rank, rank.before_ms, rank.after_ms, rank.uncertainty_ms)
"""
