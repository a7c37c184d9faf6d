"""Why a run failed: error logs in, the first failing rank and the cause in one sentence out.

``lines`` takes the prefixes off log lines (rank, time, level); ``statements`` finds what reports a failure
by its form; ``causes`` explains one statement, by ``messages.tsv``; ``failures`` combines those of a run and
picks the first; ``training`` finds what goes wrong in a run without ending it.
"""
