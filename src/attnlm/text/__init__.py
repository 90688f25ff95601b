"""Text from names, files, folders, the web and pipes."""
