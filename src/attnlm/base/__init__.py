"""What every room needs: errors, events, files, folders, locks, signals."""
