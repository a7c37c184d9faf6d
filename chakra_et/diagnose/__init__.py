"""What bounds a run, which rank is slow and what to change, each with the gain that a prediction gives it.

found = diagnose(load_run("outputs/gpt2"))
print("\n".join(found.lines()))
"""
