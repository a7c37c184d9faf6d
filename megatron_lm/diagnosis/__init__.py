"""Why a run failed: error logs in, the first failing rank and the cause in one sentence out.

``statements`` finds what reports a failure by its form; ``failures`` explains each, by ``messages.tsv``, and
picks a run's first.
"""
