"""Record a training process: a program in, host and device traces and manifest out. Needs PyTorch."""
