"""Command line: each command parses its options, calls the library once and prints the result."""
