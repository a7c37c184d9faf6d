"""FASOP: plan how a transformer is spread over a cluster of mixed GPUs."""
