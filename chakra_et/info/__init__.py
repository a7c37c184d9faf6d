"""Describe .et files one by one: their nodes, dependencies, span and metadata."""
