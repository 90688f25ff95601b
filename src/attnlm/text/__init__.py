"""Text from names, files, folders, the web, pipes."""
