"""Why a run failed: error logs in, the first failing rank and the cause in one sentence out."""
