"""What a run leaves behind: files, timings."""
