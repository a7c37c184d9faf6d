"""What users read and run. Plans go in; tables and CSV (``report``), and Chakra execution traces
(``traces``) come out.
"""
