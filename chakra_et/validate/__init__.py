"""Check .et files before a simulator reads them: columns in, a list of broken rules out."""
