"""Describe .et files: columns in, one dict per file out, printed as JSON or text."""
