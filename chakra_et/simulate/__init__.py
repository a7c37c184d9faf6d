"""Replay .et files from durations and dependencies alone: columns in, start and end times out."""
