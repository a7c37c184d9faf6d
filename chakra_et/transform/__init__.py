"""Change a run: job in, job out. Each transform says what it assumed."""
