"""Kernel implementations that call the C++ code in `native/`."""
