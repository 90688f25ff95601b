"""Errors, events, files, folders, locks and signals, which all other packages use."""
