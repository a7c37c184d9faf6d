"""What users read and run. Plans go in; tables and CSV (``report``), pictures (``picture``), Chakra execution
traces (``traces``) and launch settings (``export``) come out.
"""
