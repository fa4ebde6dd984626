"""What a run gives: files on disk, exports, timings and the report."""
