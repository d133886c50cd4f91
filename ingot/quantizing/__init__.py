"""Quantize weights with a calibration text: the methods, what they change, and the choice of formats."""
