"""What a run learned, to be looked at: pictures and pages that open offline, from files."""
