"""What kernels call."""
