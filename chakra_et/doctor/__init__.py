"""Whether this project is right on this machine: captures, predictions and kernel times against measurements.

chakra-et doctor -o doctor --part what-ifs
"""
