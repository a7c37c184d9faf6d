"""What holds only for gloo ranks that share cores: threads of operators, and contention with transfers."""
