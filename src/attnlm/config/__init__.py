"""Settings, their checks, and recipes."""
