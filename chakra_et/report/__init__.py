"""Look at a run: .et files in (or traces, which are converted on the way), one self-contained page out.

``inputs`` finds the runs that the user named, ``run`` reads and replays one, ``content`` gathers what a page
shows, ``page`` writes it. ``compare`` puts runs side by side; ``schedule`` shows any lanes of spans.
"""
