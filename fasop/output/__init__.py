"""What users read and run. Plans go in; tables and CSV (``report``), pictures (``picture``) and Chakra
execution
traces (``traces``) come out.
"""
