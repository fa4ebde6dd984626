"""What to remove: gates, scores, selection."""
