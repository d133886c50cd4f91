"""The inductor backend: compiles regions (connected calls) ahead of time with AOTInductor."""
