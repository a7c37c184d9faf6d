"""From a set of .et files to a folder that ASTRA-sim runs."""
