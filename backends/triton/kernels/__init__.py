"""Triton kernels: functions of `triton.jit` alone, which lowerings put into schedules."""
