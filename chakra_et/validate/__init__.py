"""Check .et files before a simulator reads them: columns in, a list of broken rules out.

``table.RULES`` lists every rule with its severity and consequence; ``rules`` checks one file, ``ranks`` the
files of a run against each other, ``check`` runs both.
"""
