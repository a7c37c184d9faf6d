"""What things take: kernels from shapes and types on a GPU, collectives and messages on a network."""
