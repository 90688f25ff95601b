"""The command line: options, one library call, what a person sees."""
