"""What users read and run. Plans go in; tables and CSV (``report``), settings of frameworks (``frameworks``)
and Chakra execution traces (``traces``) come out.
"""
