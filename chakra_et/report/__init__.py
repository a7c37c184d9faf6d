"""Look at a run: .et files in (or traces, which are converted on the way), one self-contained page out.

``inputs`` finds the runs that the user named, ``run`` reads one and replays it, ``content`` says what is on
the page, ``page`` writes it; ``compare`` puts runs side by side, ``timeline`` draws spans of any kind.
"""
