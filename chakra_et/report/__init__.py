"""Look at a run: .et files in (or traces, which are converted on the way), one self-contained page out."""
