"""Record a training process: a running PyTorch program in, host and device traces and a manifest out.

``tracer.ChakraTracer`` is the context manager that a training loop uses. The other modules write its files,
check that host and device traces can be linked, label the process groups and describe the run. Needs PyTorch.
"""
