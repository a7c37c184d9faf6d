"""Runs of very many ranks: skeletons of their files, clusters that convert them."""
