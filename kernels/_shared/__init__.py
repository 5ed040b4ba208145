"""What the Triton kernels share. Importing this package imports no Triton."""
