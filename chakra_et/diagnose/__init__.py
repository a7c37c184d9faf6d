"""What bounds a run, which rank is slow and what to change, each with the gain that a prediction gives it.

    found = diagnose(load_run("outputs/gpt2"))
    print("\n".join(found.lines()))

``node_classes`` sorts nodes by what their time is spent on, ``gains`` predicts the step without some of it,
and what devices and threads do meanwhile; ``verdict`` puts them together. Report, compare,
stragglers and ``chakra-et diagnose`` take their headlines from here.
"""
