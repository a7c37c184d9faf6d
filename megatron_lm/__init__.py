"""Train GPT models with an uneven pipeline on megatron-core, under Slurm or on one machine.

The packages, from the bottom up: ``settings`` are the values of ``_00_conf.sh``; ``engine`` trains with
them; ``slurm`` launches nodes; ``logs`` reads what a run wrote; ``diagnosis`` explains failures;
``results`` shows it all. The numbered scripts in this folder are the commands.
"""
