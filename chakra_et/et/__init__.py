"""The Chakra execution trace format: columns in memory, bytes in an .et file."""
