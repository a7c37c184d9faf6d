"""The commands of ``python -m fasop``. Arguments go in; each module parses them into one config, calls the
packages below and prints. Nothing is computed here.
"""
