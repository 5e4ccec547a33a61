"""Quantization for axlearn, through qwix: training in int8 and fp8, weights stored as int8 or int4."""
