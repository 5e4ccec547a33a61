"""Quantization for axlearn with qwix: training in int8 and fp8, and weights stored as int8 or int4."""
