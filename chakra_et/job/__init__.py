"""All ranks of a run as one value: ranks, groups, mesh, operator tree, repeated blocks, gradients."""
