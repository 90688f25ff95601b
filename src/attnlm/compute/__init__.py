"""Devices, threads, processes and native code."""
