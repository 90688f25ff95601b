"""Errors, events, files, folders, settings and signals, which all other packages use."""
