"""Why a run failed: error logs in, the first failing rank and the cause in one sentence out.

``lines`` takes prefixes off log lines; ``statements`` finds what reports a failure by its form; ``causes``
explains one, by ``messages.tsv``; ``failures`` picks a run's first; ``training`` sees what ends no run.
"""
