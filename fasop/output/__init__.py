"""Plans in; tables and CSV (``report``), settings (``frameworks``) and Chakra traces (``traces``) out."""
