"""Read recorded traces: JSON files in, columns out."""
