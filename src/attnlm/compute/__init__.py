"""Where and how fast: devices, threads, native code."""
