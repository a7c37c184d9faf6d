"""Record a training process: a running PyTorch program in, host and device traces and a manifest out.

``tracer.ChakraTracer`` is the context manager that a training loop uses; the other modules name its files,
check a pair that was just written, name the process groups and describe the run. Needs PyTorch.
"""
